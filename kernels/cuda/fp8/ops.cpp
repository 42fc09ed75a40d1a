// torch.ops.voltserve.fp8_* on CUDA tensors. The contract is contracts/fp8.h; on this device
//
//   packed  uint8 [N', K'], N' and K' being N and K rounded up to whole tiles of 32 by 64 (common/layout8.cuh)
//   scales  float32 [N', 1]: row factors. In blocks of 128 columns float32 [N', 1 + ceil(K'/64 / 2)]: N' row factors, and behind them the
//           tiles' scales as fp16
//   x, y    float16 only: a V100 computes in it
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "contracts/fp8.h"
#include "cuda/common/binding.h"
#include "cuda/common/layout8.cuh"
#include "cuda/fp8/launch.h"
#include "cuda/linear/dense.h"
#include "cuda/linear/launch.h"
#include "cuda/linear/plan.h"

namespace {

using namespace voltserve;

// W [N, K] in the packed layout.
struct Matrix {
  const uint4 *codes;
  const float *row_factor;
  const uint8_t *tile_scales;
  int64_t n, k;
  int group;  // kFp8Rows or kFp8Blocks
};

// A group size of the op as the kernels know it. A matrix of 128 columns or fewer has one scale per row either way.
int group_of(int64_t group_size, int64_t columns) {
  expect_multiple("codes", "K", columns, kFp8Columns);
  if (group_size == columns) return kFp8Rows;
  STD_TORCH_CHECK(group_size == kFp8Block, "group_size: expected K=", columns, " or ", kFp8Block, ", got ", group_size);
  return kFp8Blocks;
}

// Words of 4 bytes per row of W beside its codes.
int64_t scale_words(int group, int64_t columns) {
  return group == kFp8Rows ? 1 : 1 + ceil_div(ceil_div(static_cast<int>(columns), kTileColumns), 2);
}

Matrix matrix(const Call &call, const Tensor &packed, const Tensor &scales, int64_t n, int64_t k, int64_t group_size) {
  const int group = group_of(group_size, k);
  expect_at_least("rows", n, 0);
  const int64_t rows = padded(n, kTileRows);
  expect("packed", packed, call.place, ScalarType::Byte, {rows, padded(k, kTileColumns)});
  expect("scales", scales, call.place, ScalarType::Float, {rows, scale_words(group, k)});
  const float *factors = data<const float>(scales);
  return {data<const uint4>(packed), factors, reinterpret_cast<const uint8_t *>(factors + rows), n, k, group};
}

std::tuple<Tensor, Tensor> pack(Tensor codes, Tensor scales, int64_t group_size) {
  const Call call("codes", codes);
  expect("codes", codes, call.place, ScalarType::Float8_e4m3fn, {-1, -1});
  const int64_t n = codes.size(0), k = codes.size(1);
  const int group = group_of(group_size, k);
  expect("scales", scales, call.place, ScalarType::Float, {n, (k + group_size - 1) / group_size});
  const int64_t rows = padded(n, kTileRows);
  Tensor packed = torch::stable::new_empty(codes, {rows, padded(k, kTileColumns)}, ScalarType::Byte);
  Tensor packed_scales = torch::stable::new_empty(scales, {rows, scale_words(group, k)});
  Tensor nan_row = torch::stable::new_zeros(codes, {1}, ScalarType::Int);
  if (n > 0 && k > 0) {
    float *factors = data<float>(packed_scales);
    check(launch_fp8_repack(data<const uint8_t>(codes), data<uint4>(packed), data<int>(nan_row), n, k, call.stream), "fp8_pack");
    check(
        launch_fp8_scales(data<const float>(scales), factors, reinterpret_cast<__half *>(factors + rows), n, k, group, call.stream),
        "fp8_pack");
  }
  int nan = 0;  // one past its row; done once, at load, so waiting for the GPU is cheap
  check(cudaMemcpyAsync(&nan, nan_row.data_ptr(), sizeof nan, cudaMemcpyDeviceToHost, call.stream), "fp8_pack");
  check(cudaStreamSynchronize(call.stream), "fp8_pack");
  STD_TORCH_CHECK(nan == 0, "codes: expected numbers, got NaN in row ", nan - 1);
  return {packed, packed_scales};
}

void dequantize_rows(const Call &call, const Matrix &w, int64_t first, const Tensor &out) {
  check(launch_dequantize(w.codes, w.tile_scales, w.row_factor, data<__half>(out), first, out.size(0), w.k, w.group, call.stream),
        "fp8_dequantize");
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, int64_t rows, int64_t group_size, std::optional<Tensor> bias) {
  const Call call("packed", packed);
  expect_dtype("x", x.scalar_type(), {ScalarType::Half});
  STD_TORCH_CHECK(x.dim() > 0, "x: expected [..., K], got ", describe(x));
  const Matrix w = matrix(call, packed, scales, rows, x.size(x.dim() - 1), group_size);
  expect_last_dimension("x", x, call.place, w.k);
  if (bias) expect("bias", *bias, call.place, ScalarType::Half, {w.n});

  std::vector<int64_t> shape = shape_of(x);
  shape.back() = w.n;
  int64_t m = 1;
  for (size_t d = 0; d + 1 < shape.size(); ++d) m *= shape[d];
  Tensor y = empty(call, x, shape);
  if (m == 0 || w.n == 0) return y;
  const Tensor from = readable(x, w.k);

  const Plan chosen =
      plan({static_cast<int>(m), static_cast<int>(w.n), static_cast<int>(w.k), w.group, call.gpu.arch, call.gpu.processors, 0});
  if (chosen.path == Path::dequantize) {
    multiply_in_tiles(call, from, w.n, w.k, shaped(y, {m, w.n}),
                      [&](int64_t first, const Tensor &part) { dequantize_rows(call, w, first, part); });
    return bias ? torch::stable::subtract(y, *bias, -1.0) : y;  // the stable ABI has no add
  }
  LinearArgs args{};
  args.x = halves(from);
  args.codes = w.codes;
  args.scales = w.tile_scales;
  args.row_factor = w.row_factor;
  args.bias = bias ? halves(*bias) : nullptr;
  args.y = data<__half>(y);
  args.workspace = static_cast<uint32_t *>(workspace(call, Use::mailbox, chosen.workspace_words));
  args.m = m;
  args.n = w.n;
  args.k = w.k;
  args.x_stride = from.stride(0);
  check(launch_linear(args, w.group, chosen, call.stream), "fp8_linear");
  return y;
}

Tensor dequantize(Tensor packed, Tensor scales, int64_t rows, int64_t columns, int64_t group_size, ScalarType dtype) {
  const Call call("packed", packed);
  const Matrix w = matrix(call, packed, scales, rows, columns, group_size);
  expect_dtype("dtype", dtype, {ScalarType::Half});
  const Tensor out = torch::stable::new_empty(scales, {w.n, w.k}, ScalarType::Half);
  if (w.n > 0) dequantize_rows(call, w, 0, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("fp8_pack", TORCH_BOX(&pack));
  m.impl("fp8_linear", TORCH_BOX(&linear));
  m.impl("fp8_dequantize", TORCH_BOX(&dequantize));
}
