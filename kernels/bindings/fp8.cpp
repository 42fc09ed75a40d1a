// torch.ops.voltserve.fp8_*: schemas for all devices, and the ops on the CPU. The contract is contracts/fp8.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "contracts/fp8.h"
#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/pool.h"

namespace {

using namespace voltserve;
using namespace voltserve::cpu;

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};

Tensor in_float(const Tensor &tensor) {
  return torch::stable::contiguous(tensor.scalar_type() == ScalarType::Float ? tensor
                                                                             : torch::stable::to(tensor, ScalarType::Float));
}

const float *floats(const Tensor &tensor) { return static_cast<const float *>(tensor.const_data_ptr()); }
float *floats_of(Tensor &tensor) { return static_cast<float *>(tensor.mutable_data_ptr()); }

void expect_groups(int64_t group_size, int64_t columns) {
  expect_multiple("codes", "K", columns, kFp8Columns);
  STD_TORCH_CHECK(group_size == columns || group_size == kFp8Block, "group_size: expected K=", columns, " or ", kFp8Block, ", got ",
                  group_size);
}

std::tuple<Tensor, Tensor> pack_matrix(Tensor codes, Tensor scales, int64_t group_size) {
  expect("codes", codes, kCpu, ScalarType::Float8_e4m3fn, {-1, -1});
  const int64_t rows = codes.size(0), columns = codes.size(1), tiles = tiles_of(rows);
  expect_groups(group_size, columns);
  const int64_t groups = (columns + group_size - 1) / group_size;
  expect("scales", scales, kCpu, ScalarType::Float, {rows, groups});
  const auto *from = static_cast<const uint8_t *>(codes.const_data_ptr());
  for (int64_t i = 0; i < rows * columns; ++i) {
    STD_TORCH_CHECK((from[i] & 0x7F) != 0x7F, "codes: expected numbers, got NaN at [", i / columns, ", ", i % columns, "]");
  }
  Tensor packed = torch::stable::new_empty(codes, {tiles * kTileRows, columns}, ScalarType::Byte);
  Tensor packed_scales = torch::stable::new_empty(scales, {tiles * kTileRows, groups});
  auto *to = static_cast<uint8_t *>(packed.mutable_data_ptr());
  float *to_scales = floats_of(packed_scales);
  parallel_for(tiles, grain(kTileRows * columns), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int r = 0; r < kTileRows; ++r) {
        const int64_t row = tile * kTileRows + r;
        for (int64_t k = 0; k < columns; ++k) {
          to[(tile * columns + k) * kTileRows + r] = row < rows ? from[row * columns + k] : 0;
        }
        for (int64_t g = 0; g < groups; ++g) {
          to_scales[(tile * groups + g) * kTileRows + r] = row < rows ? floats(scales)[row * groups + g] : 0;
        }
      }
    }
  });
  return {packed, packed_scales};
}

Fp8Matrix matrix(const Tensor &packed, const Tensor &scales, int64_t rows, int64_t columns, int64_t group_size) {
  expect_groups(group_size, columns);
  expect_at_least("rows", rows, 0);
  const int64_t padded = tiles_of(rows) * kTileRows;
  expect("packed", packed, kCpu, ScalarType::Byte, {padded, columns});
  const Fp8Matrix w = {static_cast<const uint8_t *>(packed.const_data_ptr()), floats(scales), rows, columns, group_size};
  expect("scales", scales, kCpu, ScalarType::Float, {padded, w.groups()});
  return w;
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, int64_t rows, int64_t group_size, std::optional<Tensor> bias) {
  expect_dtype("x", x.scalar_type(), kFloats);
  STD_TORCH_CHECK(packed.dim() == 2, "packed: expected [N', K], got ", describe(packed));
  const Fp8Matrix w = matrix(packed, scales, rows, packed.size(1), group_size);
  expect_last_dimension("x", x, kCpu, w.columns);
  if (bias) expect("bias", *bias, kCpu, x.scalar_type(), {w.rows});
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = 1;
  const int64_t m = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  shape.back() = w.rows;
  const Tensor from = in_float(x);
  const std::optional<Tensor> add = bias ? std::optional(in_float(*bias)) : std::nullopt;
  Tensor y = torch::stable::new_empty(x, shape, ScalarType::Float);
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns * m), [&](int64_t begin, int64_t end) {
    chosen()->fp8_linear(w, floats(from), m, add ? floats(*add) : nullptr, floats_of(y), begin, end);
  });
  return x.scalar_type() == ScalarType::Float ? y : torch::stable::to(y, x.scalar_type());
}

Tensor dequantize(Tensor packed, Tensor scales, int64_t rows, int64_t columns, int64_t group_size, ScalarType dtype) {
  const Fp8Matrix w = matrix(packed, scales, rows, columns, group_size);
  expect_dtype("dtype", dtype, kFloats);
  Tensor out = torch::stable::new_empty(scales, {w.rows, w.columns});
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns),
               [&](int64_t begin, int64_t end) { chosen()->fp8_dequantize(w, floats_of(out), begin, end); });
  return dtype == ScalarType::Float ? out : torch::stable::to(out, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def("fp8_pack(Tensor codes, Tensor scales, int group_size) -> (Tensor, Tensor)");
  m.def("fp8_linear(Tensor x, Tensor packed, Tensor scales, int rows, int group_size, Tensor? bias=None) -> Tensor");
  m.def(
      "fp8_dequantize(Tensor packed, Tensor scales, int rows, int columns, int group_size, ScalarType dtype) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("fp8_pack", TORCH_BOX(&pack_matrix));
  m.impl("fp8_linear", TORCH_BOX(&linear));
  m.impl("fp8_dequantize", TORCH_BOX(&dequantize));
}
