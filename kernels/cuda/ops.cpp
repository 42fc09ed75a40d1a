// torch.ops.voltserve.* on CUDA tensors: argument checks, workspace, and the choice of path (plan.h). Compiled in where an nvcc
// for sm_70 is at hand. The contract is include/nvfp4.h; on this device
//
//   packed  uint8 [N', K'/2] and scales float8_e4m3fn [N', K/g], a view whose row stride is K'/g: N' and K' are N and K rounded up
//           to whole tiles of 32 by 64 (layout.cuh)
//   x, y    float16 only: a V100 computes in it
//
// and one op more, for mixtures of experts:
//   nvfp4_moe_linear(x, packed, scales, row_factor, group_size, slots, experts, padded_slots, top_k) -> y
//       packed [E, N', K'/2], scales [E, N', K/g], row_factor [E, N]; slots, experts and padded_slots as vLLM's
//       moe_align_block_size makes them with a block of 8, 16, 32 or 64; y [M * top_k, N], one row a slot.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch.h"
#include "layout.cuh"
#include "plan.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using namespace voltserve;

// fp16 weights that exist at a time on the way to cuBLAS.
constexpr int64_t kDequantizedBytes = 64 << 20;

std::string describe(const Tensor& tensor) {
  std::string text = std::string(torch::headeronly::toString(tensor.scalar_type())) + " [";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]" + (tensor.is_cuda() ? "" : " not on a GPU");
}

// The one check of an argument: on this GPU, its dtype, its shape (-1 is any length), contiguous unless `view`.
void expect(const char* name, const Tensor& tensor, ScalarType dtype, const std::vector<int64_t>& shape, bool view = false) {
  bool fits = tensor.is_cuda() && tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(shape.size()) &&
              (view || tensor.is_contiguous());
  std::string expected = std::string(torch::headeronly::toString(dtype)) + " [";
  for (size_t d = 0; d < shape.size(); ++d) {
    fits = fits && (shape[d] < 0 || tensor.size(d) == shape[d]);
    expected += (d ? ", " : "") + (shape[d] < 0 ? "any" : std::to_string(shape[d]));
  }
  STD_TORCH_CHECK(fits, name, ": expected ", view ? "" : "contiguous ", expected, "] on a GPU, got ",
                  tensor.is_contiguous() ? "" : "non-contiguous ", describe(tensor));
}

void expect_group_size(int64_t group_size) {
  STD_TORCH_CHECK(group_size == 16 || group_size == 32, "group_size: expected 16 or 32, got ", group_size);
}

void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

int64_t padded(int64_t length, int64_t tile) { return (length + tile - 1) / tile * tile; }

struct Gpu {
  int index, arch, processors;
};

const Gpu& gpu_of(const Tensor& tensor) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const int index = tensor.get_device_index();
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  int major = 0, minor = 0, processors = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "compute capability");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index), "multiprocessors");
  return known[index] = {index, 10 * major + minor, processors};
}

cudaStream_t stream_of(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Sums that blocks share, and counters, all zero between launches. One for each stream, so that streams do not meet; grown
// ones stay alive, since a captured graph may point at them.
struct Workspace {
  Tensor sums, counters;
};

Workspace workspace(const Tensor& like, cudaStream_t stream, const Plan& plan) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, std::vector<Workspace>>* const all =
      new std::map<std::pair<int, void*>, std::vector<Workspace>>;  // outlives torch's allocator at exit
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Workspace>& grown = (*all)[{like.get_device_index(), stream}];
  const int64_t floats = std::max<int64_t>(plan.workspace_floats, 1), counters = std::max(plan.counters, 1);
  if (grown.empty() || grown.back().sums.size(0) < floats || grown.back().counters.size(0) < counters) {
    const int64_t old_floats = grown.empty() ? 0 : grown.back().sums.size(0);
    const int64_t old_counters = grown.empty() ? 1024 : grown.back().counters.size(0);
    grown.push_back({torch::stable::new_empty(like, {std::max(floats, old_floats)}, ScalarType::Float),
                     torch::stable::new_zeros(like, {std::max(counters, old_counters)}, ScalarType::Int)});
  }
  return grown.back();
}

// W [N, K] in the packed layout, or E of them.
struct Matrix {
  int64_t n, k;
  int group;
};

Matrix matrix(const Tensor& packed, const Tensor& scales, const Tensor& row_factor, int64_t group_size, int64_t experts) {
  expect_group_size(group_size);
  std::vector<int64_t> lead;
  if (experts) lead.push_back(experts);
  auto with = [&](std::vector<int64_t> shape) {
    shape.insert(shape.begin(), lead.begin(), lead.end());
    return shape;
  };
  expect("row_factor", row_factor, ScalarType::Float, with({-1}));
  const int64_t n = row_factor.size(row_factor.dim() - 1), rows = padded(n, kTileRows);
  expect("scales", scales, ScalarType::Float8_e4m3fn, with({rows, -1}), true);
  const int64_t k = scales.size(scales.dim() - 1) * group_size, columns = padded(k, kTileColumns);
  expect("packed", packed, ScalarType::Byte, with({rows, columns / 2}));
  STD_TORCH_CHECK(scales.stride(scales.dim() - 1) == 1 && scales.stride(scales.dim() - 2) == columns / group_size,
                  "scales: expected the view that nvfp4_pack returned, with row stride ", columns / group_size,
                  ", got ", scales.stride(scales.dim() - 2));
  return {n, k, static_cast<int>(group_size)};
}

std::tuple<Tensor, Tensor> pack(Tensor codes, Tensor block_scales, int64_t group_size) {
  expect_group_size(group_size);
  expect("codes", codes, ScalarType::Byte, {-1, -1});
  const int64_t n = codes.size(0), k = 2 * codes.size(1), groups = k / group_size;
  STD_TORCH_CHECK(k % group_size == 0, "codes: expected K a multiple of ", group_size, ", got K = ", k);
  expect("block_scales", block_scales, ScalarType::Float8_e4m3fn, {n, groups});
  const DeviceGuard guard(codes.get_device_index());
  const cudaStream_t stream = stream_of(codes.get_device_index());
  const int64_t rows = padded(n, kTileRows), columns = padded(k, kTileColumns);
  Tensor packed = torch::stable::new_empty(codes, {rows, columns / 2});
  Tensor scales = torch::stable::new_empty(block_scales, {rows, columns / group_size});
  Tensor first_nan = torch::stable::new_zeros(codes, {1}, ScalarType::Int);
  if (n > 0 && k > 0) {
    check(launch_repack(data<const uint8_t>(codes), data<const uint8_t>(block_scales), data<uint4>(packed),
                        data<uint8_t>(scales), data<int>(first_nan), n, k, group_size, stream),
          "nvfp4_pack");
  }
  int nan = 0;  // one past its index; done once, at load, so waiting for the GPU is cheap
  check(cudaMemcpyAsync(&nan, first_nan.data_ptr(), sizeof nan, cudaMemcpyDeviceToHost, stream), "nvfp4_pack");
  check(cudaStreamSynchronize(stream), "nvfp4_pack");
  STD_TORCH_CHECK(nan == 0, "block_scales: expected numbers, got NaN at [", (nan - 1) / std::max<int64_t>(groups, 1), ", ",
                  (nan - 1) % std::max<int64_t>(groups, 1), "]");
  return {packed, torch::stable::narrow(scales, 1, 0, groups)};
}

// x as the kernels read it: [M, K], elements of a row together, rows 16-byte aligned.
Tensor readable(const Tensor& x, int64_t k) {
  int64_t m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= x.size(d);
  Tensor flat = torch::stable::reshape(x, {m, k});
  const bool aligned = reinterpret_cast<uintptr_t>(flat.data_ptr()) % 16 == 0;
  if (flat.stride(1) == 1 && (flat.stride(0) % 8 == 0 || m == 1) && aligned) return flat;
  return torch::stable::clone(torch::stable::contiguous(flat));
}

// y[:, first : first + rows] = x w^T on cuBLAS, w [rows, K] fp16.
void multiply_dense(const Tensor& x, const Tensor& w, const Tensor& y, int64_t first) {
  Tensor columns = torch::stable::narrow(const_cast<Tensor&>(y), 1, first, w.size(0));
  StableIValue stack[3] = {torch::stable::detail::from(x), torch::stable::detail::from(torch::stable::transpose(w, 0, 1)),
                           torch::stable::detail::from(columns)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

void dequantize_rows(const Tensor& packed, const Tensor& scales, const Tensor& row_factor, const Matrix& w, int64_t first,
                     Tensor& out, cudaStream_t stream) {
  check(launch_dequantize(data<const uint4>(packed), data<const uint8_t>(scales), data<const float>(row_factor),
                          reinterpret_cast<__half*>(out.data_ptr()), first, out.size(0), w.k, w.group, stream),
        "nvfp4_dequantize");
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, std::optional<Tensor> bias) {
  const Matrix w = matrix(packed, scales, row_factor, group_size, 0);
  STD_TORCH_CHECK(x.is_cuda() && x.scalar_type() == ScalarType::Half && x.dim() > 0 && x.size(x.dim() - 1) == w.k,
                  "x: expected Half [..., ", w.k, "] on a GPU, got ", describe(x));
  if (bias) expect("bias", *bias, ScalarType::Half, {w.n});
  const Gpu& gpu = gpu_of(packed);
  STD_TORCH_CHECK(x.get_device_index() == gpu.index, "x: expected GPU ", gpu.index, ", got GPU ", x.get_device_index());
  const DeviceGuard guard(gpu.index);
  const cudaStream_t stream = stream_of(gpu.index);

  std::vector<int64_t> shape(x.dim());
  int64_t m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= shape[d] = x.size(d);
  shape.back() = w.n;
  Tensor y = torch::stable::new_empty(x, {m, w.n});
  if (m == 0 || w.n == 0) return torch::stable::reshape(y, shape);
  const Tensor from = readable(x, w.k);

  const Plan chosen = plan({static_cast<int>(m), static_cast<int>(w.n), static_cast<int>(w.k), w.group, gpu.arch, gpu.processors, 0});
  if (chosen.path == Path::dequantize) {
    const int64_t step = std::max<int64_t>(kTileRows, kDequantizedBytes / (2 * w.k) / kTileRows * kTileRows);
    Tensor scratch = torch::stable::new_empty(x, {std::min(step, w.n), w.k});
    for (int64_t first = 0; first < w.n; first += step) {
      Tensor rows = torch::stable::narrow(scratch, 0, 0, std::min(step, w.n - first));
      dequantize_rows(packed, scales, row_factor, w, first, rows, stream);
      multiply_dense(from, rows, y, first);
    }
    if (bias) y = torch::stable::subtract(y, *bias, -1.0);  // the stable ABI has no add
    return torch::stable::reshape(y, shape);
  }
  const Workspace space = workspace(row_factor, stream, chosen);
  LinearArgs args{};
  args.x = reinterpret_cast<const __half*>(from.data_ptr());
  args.codes = data<const uint4>(packed);
  args.scales = data<const uint8_t>(scales);
  args.row_factor = data<const float>(row_factor);
  args.bias = bias ? reinterpret_cast<const __half*>(bias->data_ptr()) : nullptr;
  args.y = reinterpret_cast<__half*>(y.data_ptr());
  args.workspace = data<float>(space.sums);
  args.counters = data<unsigned>(space.counters);
  args.m = m;
  args.n = w.n;
  args.k = w.k;
  args.x_stride = from.stride(0);
  check(launch_linear(args, w.group, chosen, stream), "nvfp4_linear");
  return torch::stable::reshape(y, shape);
}

Tensor moe_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, Tensor slots, Tensor experts,
                  Tensor padded_slots, int64_t top_k) {
  STD_TORCH_CHECK(packed.dim() == 3, "packed: expected [E, N', K'/2], got ", describe(packed));
  const Matrix w = matrix(packed, scales, row_factor, group_size, packed.size(0));
  expect("x", x, ScalarType::Half, {-1, w.k});
  expect("slots", slots, ScalarType::Int, {-1});
  expect("experts", experts, ScalarType::Int, {-1});
  expect("padded_slots", padded_slots, ScalarType::Int, {1});
  STD_TORCH_CHECK(top_k > 0, "top_k: expected at least 1, got ", top_k);
  const int64_t blocks = experts.size(0), block = blocks ? slots.size(0) / blocks : 0;
  const Gpu& gpu = gpu_of(packed);
  const DeviceGuard guard(gpu.index);
  const cudaStream_t stream = stream_of(gpu.index);
  const int64_t m = x.size(0);
  Tensor y = torch::stable::new_empty(x, {m * top_k, w.n});
  if (m == 0 || blocks == 0) return y;
  Plan chosen = plan_grouped({static_cast<int>(m * top_k), static_cast<int>(w.n), static_cast<int>(w.k), w.group, gpu.arch,
                              gpu.processors, static_cast<int>(packed.size(0))},
                             block, blocks);
  const Workspace space = workspace(row_factor, stream, chosen);
  const Tensor from = readable(x, w.k);
  LinearArgs args{};
  args.x = reinterpret_cast<const __half*>(from.data_ptr());
  args.codes = data<const uint4>(packed);
  args.scales = data<const uint8_t>(scales);
  args.row_factor = data<const float>(row_factor);
  args.y = reinterpret_cast<__half*>(y.data_ptr());
  args.workspace = data<float>(space.sums);
  args.counters = data<unsigned>(space.counters);
  args.m = m;
  args.n = w.n;
  args.k = w.k;
  args.x_stride = from.stride(0);
  args.slots = data<const int>(slots);
  args.experts = data<const int>(experts);
  args.padded_slots = data<const int>(padded_slots);
  args.top_k = top_k;
  check(launch_linear(args, w.group, chosen, stream), "nvfp4_moe_linear");
  return y;
}

Tensor dequantize(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype) {
  const Matrix w = matrix(packed, scales, row_factor, group_size, 0);
  STD_TORCH_CHECK(dtype == ScalarType::Half, "dtype: expected Half on a GPU, got ", torch::headeronly::toString(dtype));
  const DeviceGuard guard(packed.get_device_index());
  Tensor out = torch::stable::new_empty(row_factor, {w.n, w.k}, ScalarType::Half);
  if (w.n > 0) dequantize_rows(packed, scales, row_factor, w, 0, out, stream_of(packed.get_device_index()));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def(
      "nvfp4_moe_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int group_size, Tensor slots, Tensor "
      "experts, Tensor padded_slots, int top_k) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("nvfp4_pack", TORCH_BOX(&pack));
  m.impl("nvfp4_linear", TORCH_BOX(&linear));
  m.impl("nvfp4_dequantize", TORCH_BOX(&dequantize));
  m.impl("nvfp4_moe_linear", TORCH_BOX(&moe_linear));
}
