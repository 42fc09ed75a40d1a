// torch.ops.voltserve.*: schemas, argument checks, allocation. Built on torch's stable ABI, so that one shared object serves
// torch 2.10 and later and every Python. The contract is include/nvfp4.h; nothing else here knows kernels' insides.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "include/nvfp4.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using voltserve::Nvfp4Matrix;

const char* name_of(ScalarType dtype) { return torch::headeronly::toString(dtype); }

std::string describe(const Tensor& tensor) {
  std::string text = std::string(name_of(tensor.scalar_type())) + " [";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]" + (tensor.is_cpu() ? " on the CPU" : " on a GPU");
}

// The one check of an argument: its dtype, its shape (-1 is any length), its device, contiguity.
void expect(const char* name, const Tensor& tensor, ScalarType dtype, const std::vector<int64_t>& shape, bool on_cpu) {
  bool fits = tensor.scalar_type() == dtype && tensor.dim() == static_cast<int64_t>(shape.size()) &&
              tensor.is_cpu() == on_cpu && tensor.is_contiguous();
  std::string expected = std::string(name_of(dtype)) + " [";
  for (size_t d = 0; d < shape.size(); ++d) {
    fits = fits && (shape[d] < 0 || tensor.size(d) == shape[d]);
    expected += (d ? ", " : "") + (shape[d] < 0 ? "any" : std::to_string(shape[d]));
  }
  STD_TORCH_CHECK(fits, name, ": expected contiguous ", expected, on_cpu ? "] on the CPU" : "] on a GPU", ", got ",
                  tensor.is_contiguous() ? "" : "non-contiguous ", describe(tensor));
}

void expect_group_size(int64_t group_size) {
  STD_TORCH_CHECK(group_size == 16 || group_size == 32, "group_size: expected 16 or 32, got ", group_size);
}

void expect_float(const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, name,
                  ": expected Float, Half or BFloat16, got ", name_of(dtype));
}

Tensor in_float(const Tensor& tensor) {
  return torch::stable::contiguous(
      tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float));
}

namespace cpu {

using namespace voltserve::cpu;

// Rows of tiles a thread takes at least: below this, waking another costs more than it saves.
constexpr int64_t kMultiplicationsPerThread = 64 * 1024;

int64_t grain(int64_t multiplications_per_tile) {
  return kMultiplicationsPerThread / std::max<int64_t>(multiplications_per_tile, 1) + 1;
}

std::tuple<Tensor, Tensor> pack(Tensor codes, Tensor block_scales, int64_t group_size) {
  expect_group_size(group_size);
  expect("codes", codes, ScalarType::Byte, {-1, -1}, true);
  const int64_t rows = codes.size(0), columns = 2 * codes.size(1), groups = columns / group_size;
  STD_TORCH_CHECK(columns % group_size == 0, "codes: expected K a multiple of ", group_size, ", got K = ", columns);
  expect("block_scales", block_scales, ScalarType::Float8_e4m3fn, {rows, groups}, true);
  const auto* scale_bytes = static_cast<const uint8_t*>(block_scales.const_data_ptr());
  for (int64_t i = 0; i < rows * groups; ++i) {
    STD_TORCH_CHECK((scale_bytes[i] & 0x7F) != 0x7F, "block_scales: expected numbers, got NaN at [", i / groups, ", ",
                    i % groups, "]");
  }
  const int64_t tiles = tiles_of(rows);
  Tensor packed = torch::stable::new_empty(codes, {tiles * kTileRows, columns / 2});
  Tensor scales = torch::stable::new_empty(block_scales, {tiles * kTileRows, groups});
  torch::stable::parallel_for(0, tiles, grain(kTileRows * columns), [&](int64_t begin, int64_t end) {
    voltserve::cpu::pack(static_cast<const uint8_t*>(codes.const_data_ptr()), scale_bytes, rows, columns,
                         static_cast<int>(group_size), static_cast<uint8_t*>(packed.mutable_data_ptr()),
                         static_cast<uint8_t*>(scales.mutable_data_ptr()), begin, end);
  });
  return {packed, scales};
}

Nvfp4Matrix matrix(const Tensor& packed, const Tensor& scales, const Tensor& row_factor, int64_t group_size) {
  expect_group_size(group_size);
  expect("row_factor", row_factor, ScalarType::Float, {-1}, true);
  const int64_t rows = row_factor.size(0), padded = tiles_of(rows) * kTileRows;
  expect("scales", scales, ScalarType::Float8_e4m3fn, {padded, -1}, true);
  const int64_t columns = scales.size(1) * group_size;
  expect("packed", packed, ScalarType::Byte, {padded, columns / 2}, true);
  return {static_cast<const uint8_t*>(packed.const_data_ptr()), static_cast<const uint8_t*>(scales.const_data_ptr()),
          static_cast<const float*>(row_factor.const_data_ptr()), rows, columns, static_cast<int>(group_size)};
}

const Kernels& kernels_for(const std::string& isa) {
  for (const Kernels* kernels : kAll) {
    if (isa.empty() ? kernels->supported() : isa == kernels->isa) return *kernels;
  }
  STD_TORCH_CHECK(false, "isa: expected avx512, avx2, portable or nothing for the best, got ", isa);
}

Tensor linear_with(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size,
                   std::optional<Tensor> bias, const Kernels& kernels) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_float("x", x.scalar_type());
  STD_TORCH_CHECK(x.is_cpu() && x.dim() > 0 && x.size(x.dim() - 1) == w.columns, "x: expected [..., ", w.columns,
                  "] on the CPU, got ", describe(x));
  if (bias) expect("bias", *bias, x.scalar_type(), {w.rows}, true);
  std::vector<int64_t> shape(x.dim());
  int64_t m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= shape[d] = x.size(d);
  shape.back() = w.rows;
  const Tensor from = in_float(x);
  const Tensor add = bias ? in_float(*bias) : from;
  Tensor y = torch::stable::new_empty(x, shape, ScalarType::Float);
  torch::stable::parallel_for(0, tiles_of(w.rows), grain(kTileRows * w.columns * m), [&](int64_t begin, int64_t end) {
    kernels.linear(w, static_cast<const float*>(from.const_data_ptr()), m,
                   bias ? static_cast<const float*>(add.const_data_ptr()) : nullptr,
                   static_cast<float*>(y.mutable_data_ptr()), begin, end);
  });
  return x.scalar_type() == ScalarType::Float ? y : torch::stable::to(y, x.scalar_type());
}

Tensor dequantize_with(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype,
                       const Kernels& kernels) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_float("dtype", dtype);
  Tensor out = torch::stable::new_empty(row_factor, {w.rows, w.columns});
  torch::stable::parallel_for(0, tiles_of(w.rows), grain(kTileRows * w.columns), [&](int64_t begin, int64_t end) {
    kernels.dequantize(w, static_cast<float*>(out.mutable_data_ptr()), begin, end);
  });
  return dtype == ScalarType::Float ? out : torch::stable::to(out, dtype);
}

const Kernels& best() {
  static const Kernels& kernels = kernels_for("");
  return kernels;
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size,
              std::optional<Tensor> bias) {
  return linear_with(x, packed, scales, row_factor, group_size, bias, best());
}

Tensor dequantize(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype) {
  return dequantize_with(packed, scales, row_factor, group_size, dtype, best());
}

// For tests: the same with the instruction set named, so that every path is tested on every machine that has it.
Tensor linear_on(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size,
                 std::optional<Tensor> bias, std::string isa) {
  return linear_with(x, packed, scales, row_factor, group_size, bias, kernels_for(isa));
}

Tensor dequantize_on(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype,
                     std::string isa) {
  return dequantize_with(packed, scales, row_factor, group_size, dtype, kernels_for(isa));
}

}  // namespace cpu

// The instruction sets this machine's CPU has kernels for, fastest first, separated by spaces.
std::string cpu_isas() {
  std::string names;
  for (const auto* kernels : voltserve::cpu::kAll) {
    if (kernels->supported()) names += (names.empty() ? "" : " ") + std::string(kernels->isa);
  }
  return names;
}

}  // namespace

STABLE_TORCH_LIBRARY(voltserve, m) {
  m.def("nvfp4_pack(Tensor codes, Tensor block_scales, int group_size) -> (Tensor, Tensor)");
  m.def(
      "nvfp4_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int group_size, Tensor? bias=None) -> "
      "Tensor");
  m.def(
      "nvfp4_dequantize(Tensor packed, Tensor scales, Tensor row_factor, int group_size, ScalarType dtype) -> Tensor");
  m.def(
      "_nvfp4_linear_on(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int group_size, Tensor? bias, str "
      "isa) -> Tensor");
  m.def(
      "_nvfp4_dequantize_on(Tensor packed, Tensor scales, Tensor row_factor, int group_size, ScalarType dtype, str "
      "isa) -> Tensor");
  m.def("_cpu_isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("nvfp4_pack", TORCH_BOX(&cpu::pack));
  m.impl("nvfp4_linear", TORCH_BOX(&cpu::linear));
  m.impl("nvfp4_dequantize", TORCH_BOX(&cpu::dequantize));
  m.impl("_nvfp4_linear_on", TORCH_BOX(&cpu::linear_on));
  m.impl("_nvfp4_dequantize_on", TORCH_BOX(&cpu::dequantize_on));
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CompositeExplicitAutograd, m) { m.impl("_cpu_isas", TORCH_BOX(&cpu_isas)); }
