// torch.ops.voltserve.nvfp4_* on CUDA tensors: argument checks, workspace, and the choice of path (plan.h). Compiled in where an
// nvcc for sm_70 is at hand. The contract is contracts/nvfp4.h; on this device
//
//   packed  uint8 [N', K'/2] and scales float8_e4m3fn [N', K/g], a view whose row stride is K'/g: N' and K' are N and K rounded up
//           to whole tiles of 32 by 64 (common/layout.cuh)
//   x, y    float16 only: a V100 computes in it
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "cuda/common/binding.h"
#include "cuda/linear/dense.h"
#include "cuda/linear/launch.h"
#include "cuda/common/layout.cuh"
#include "cuda/linear/plan.h"

namespace {

using namespace voltserve;

// W [N, K] in the packed layout, or E of them one after the other.
struct Matrix {
  const uint4 *codes;
  const uint8_t *scales;
  const float *row_factor;
  int64_t n, k;
  int group;
};

// Checks W's tensors; `lead` is [E] for E matrices, empty for one.
Matrix matrix(const Call &call, const Tensor &packed, const Tensor &scales, const Tensor &row_factor, int64_t group_size,
              const std::vector<int64_t> &lead = {}) {
  expect_group_size(group_size);
  auto with = [&](std::vector<int64_t> shape) {
    shape.insert(shape.begin(), lead.begin(), lead.end());
    return shape;
  };
  expect("row_factor", row_factor, call.place, ScalarType::Float, with({-1}));
  const int64_t n = row_factor.size(row_factor.dim() - 1), rows = padded(n, kTileRows);
  expect("scales", scales, call.place, ScalarType::Float8_e4m3fn, with({rows, -1}), Layout::strided);
  const int64_t k = scales.size(scales.dim() - 1) * group_size, columns = padded(k, kTileColumns);
  expect("packed", packed, call.place, ScalarType::Byte, with({rows, columns / 2}));
  STD_TORCH_CHECK(scales.stride(scales.dim() - 1) == 1 && scales.stride(scales.dim() - 2) == columns / group_size,
                  "scales: expected the view that nvfp4_pack returned, with row stride ", columns / group_size, ", got ",
                  scales.stride(scales.dim() - 2));
  return {data<const uint4>(packed),   data<const uint8_t>(scales), data<const float>(row_factor), n, k,
          static_cast<int>(group_size)};
}

std::tuple<Tensor, Tensor> pack(Tensor codes, Tensor block_scales, int64_t group_size) {
  const Call call("codes", codes);
  expect_group_size(group_size);
  expect("codes", codes, call.place, ScalarType::Byte, {-1, -1});
  const int64_t n = codes.size(0), k = 2 * codes.size(1), groups = k / group_size;
  expect_multiple("codes", "K", k, group_size);
  expect("block_scales", block_scales, call.place, ScalarType::Float8_e4m3fn, {n, groups});
  const int64_t rows = padded(n, kTileRows), columns = padded(k, kTileColumns);
  Tensor packed = torch::stable::new_empty(codes, {rows, columns / 2});
  Tensor scales = torch::stable::new_empty(block_scales, {rows, columns / group_size});
  Tensor first_nan = torch::stable::new_zeros(codes, {1}, ScalarType::Int);
  if (n > 0 && k > 0) {
    check(launch_repack(data<const uint8_t>(codes), data<const uint8_t>(block_scales), data<uint4>(packed), data<uint8_t>(scales),
                        data<int>(first_nan), n, k, group_size, call.stream),
          "nvfp4_pack");
  }
  int nan = 0;  // one past its index; done once, at load, so waiting for the GPU is cheap
  check(cudaMemcpyAsync(&nan, first_nan.data_ptr(), sizeof nan, cudaMemcpyDeviceToHost, call.stream), "nvfp4_pack");
  check(cudaStreamSynchronize(call.stream), "nvfp4_pack");
  STD_TORCH_CHECK(nan == 0, "block_scales: expected numbers, got NaN at [", (nan - 1) / std::max<int64_t>(groups, 1), ", ",
                  (nan - 1) % std::max<int64_t>(groups, 1), "]");
  return {packed, torch::stable::narrow(scales, 1, 0, groups)};
}

// Rows `first` .. of W to `out` [rows, K].
void dequantize_rows(const Call &call, const Matrix &w, int64_t first, const Tensor &out) {
  check(launch_dequantize(w.codes, w.scales, w.row_factor, data<__half>(out), first, out.size(0), w.k, w.group, call.stream),
        "nvfp4_dequantize");
}

// y = x W^T by way of fp16 weights and cuBLAS.
void dense(const Call &call, const Tensor &x, const Matrix &w, const Tensor &y) {
  multiply_in_tiles(call, x, w.n, w.k, y, [&](int64_t first, const Tensor &rows) { dequantize_rows(call, w, first, rows); });
}

// The fused kernels' arguments, but for bias and what only experts have.
LinearArgs fused(const Call &call, const Tensor &x, const Matrix &w, const Tensor &y, const Plan &plan) {
  LinearArgs args{};
  args.x = halves(x);
  args.codes = w.codes;
  args.scales = w.scales;
  args.row_factor = w.row_factor;
  args.y = data<__half>(y);
  args.workspace = static_cast<uint32_t *>(workspace(call, Use::mailbox, plan.workspace_words));
  args.m = x.size(0);
  args.n = w.n;
  args.k = w.k;
  args.x_stride = x.stride(0);
  return args;
}

Problem problem(const Call &call, int64_t m, const Matrix &w, int64_t experts) {
  return {static_cast<int>(m), static_cast<int>(w.n), static_cast<int>(w.k),    w.group,
          call.gpu.arch,       call.gpu.processors,   static_cast<int>(experts)};
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, std::optional<Tensor> bias) {
  const Call call("packed", packed);
  const Matrix w = matrix(call, packed, scales, row_factor, group_size);
  expect_dtype("x", x.scalar_type(), {ScalarType::Half});
  expect_last_dimension("x", x, call.place, w.k);
  if (bias) expect("bias", *bias, call.place, ScalarType::Half, {w.n});

  std::vector<int64_t> shape = shape_of(x);
  shape.back() = w.n;
  int64_t m = 1;
  for (size_t d = 0; d + 1 < shape.size(); ++d) m *= shape[d];
  Tensor y = empty(call, x, shape);
  if (m == 0 || w.n == 0) return y;
  const Tensor from = readable(x, w.k);

  const Plan chosen = plan(problem(call, m, w, 0));
  if (chosen.path == Path::dequantize) {
    dense(call, from, w, shaped(y, {m, w.n}));
    if (bias) y = torch::stable::subtract(y, *bias, -1.0);  // the stable ABI has no add
  } else {
    LinearArgs args = fused(call, from, w, y, chosen);
    if (bias) args.bias = halves(*bias);
    check(launch_linear(args, w.group, chosen, call.stream), "nvfp4_linear");
  }
  return y;
}

Tensor moe_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, Tensor slots, Tensor experts,
                  Tensor padded_slots, int64_t top_k) {
  const Call call("packed", packed);
  STD_TORCH_CHECK(packed.dim() == 3, "packed: expected [E, N', K'/2], got ", describe(packed));
  const Matrix w = matrix(call, packed, scales, row_factor, group_size, {packed.size(0)});
  expect("x", x, call.place, ScalarType::Half, {-1, w.k}, Layout::strided);
  expect("slots", slots, call.place, ScalarType::Int, {-1});
  expect("experts", experts, call.place, ScalarType::Int, {-1});
  expect("padded_slots", padded_slots, call.place, ScalarType::Int, {1});
  expect_at_least("top_k", top_k, 1);
  const int64_t blocks = experts.size(0), block = blocks ? slots.size(0) / blocks : 0, routed = x.size(0) * top_k;
  const Tensor y = empty(call, x, {routed, w.n});
  if (routed == 0 || blocks == 0) return y;
  const Tensor from = readable(x, w.k);

  const Plan chosen = plan_grouped(problem(call, routed, w, packed.size(0)), block, blocks);
  LinearArgs args = fused(call, from, w, y, chosen);
  args.slots = data<const int>(slots);
  args.experts = data<const int>(experts);
  args.padded_slots = data<const int>(padded_slots);
  args.top_k = top_k;
  check(launch_linear(args, w.group, chosen, call.stream), "nvfp4_moe_linear");
  return y;
}

Tensor dequantize(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype) {
  const Call call("packed", packed);
  const Matrix w = matrix(call, packed, scales, row_factor, group_size);
  expect_dtype("dtype", dtype, {ScalarType::Half});
  const Tensor out = torch::stable::new_empty(row_factor, {w.n, w.k}, ScalarType::Half);
  if (w.n > 0) dequantize_rows(call, w, 0, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("nvfp4_pack", TORCH_BOX(&pack));
  m.impl("nvfp4_linear", TORCH_BOX(&linear));
  m.impl("nvfp4_dequantize", TORCH_BOX(&dequantize));
  m.impl("nvfp4_moe_linear", TORCH_BOX(&moe_linear));
}
