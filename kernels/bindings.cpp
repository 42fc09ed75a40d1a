// torch.ops.voltserve.*: schemas, argument checks, allocation. Built on torch's stable ABI, so that one shared object serves
// torch 2.10 and later and every Python. The contract is include/nvfp4.h; nothing else here knows kernels' insides.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/pool.h"
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

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (int64_t d = 0; d < tensor.dim(); ++d) shape[d] = tensor.size(d);
  return shape;
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

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
float* floats_of(Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

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
  parallel_for(tiles, grain(kTileRows * columns), [&](int64_t begin, int64_t end) {
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
          floats(row_factor), rows, columns, static_cast<int>(group_size)};
}

// The kernels that the ops below use: the fastest that this machine runs, unless a test chose others.
const Kernels*& chosen() {
  static const Kernels* kernels = *std::find_if(std::begin(kAll), std::end(kAll), [](auto* one) { return one->supported(); });
  return kernels;
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size,
              std::optional<Tensor> bias) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_float("x", x.scalar_type());
  STD_TORCH_CHECK(x.is_cpu() && x.dim() > 0 && x.size(x.dim() - 1) == w.columns, "x: expected [..., ", w.columns,
                  "] on the CPU, got ", describe(x));
  if (bias) expect("bias", *bias, x.scalar_type(), {w.rows}, true);
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = 1;
  const int64_t m = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  shape.back() = w.rows;
  const Tensor from = in_float(x);
  const std::optional<Tensor> add = bias ? std::optional(in_float(*bias)) : std::nullopt;
  Tensor y = torch::stable::new_empty(x, shape, ScalarType::Float);
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns * m), [&](int64_t begin, int64_t end) {
    chosen()->linear(w, floats(from), m, add ? floats(*add) : nullptr, floats_of(y), begin, end);
  });
  return x.scalar_type() == ScalarType::Float ? y : torch::stable::to(y, x.scalar_type());
}

Tensor dequantize(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_float("dtype", dtype);
  Tensor out = torch::stable::new_empty(row_factor, {w.rows, w.columns});
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns), [&](int64_t begin, int64_t end) {
    chosen()->dequantize(w, floats_of(out), begin, end);
  });
  return dtype == ScalarType::Float ? out : torch::stable::to(out, dtype);
}

Tensor linear16(Tensor x, Tensor weight) {
  const auto dtype = weight.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "weight: expected Half or BFloat16, got ", name_of(dtype));
  expect("weight", weight, dtype, {-1, -1}, true);
  const int64_t rows = weight.size(0), columns = weight.size(1);
  STD_TORCH_CHECK(columns % kLinear16Columns == 0, "weight: expected K a multiple of ", kLinear16Columns, ", got K = ",
                  columns);
  expect("x", x, ScalarType::Float, {-1, columns}, true);
  const int64_t m = x.size(0);
  Tensor y = torch::stable::new_empty(x, {m, rows});
  const Linear16 w = {static_cast<const uint16_t*>(weight.const_data_ptr()), dtype == ScalarType::BFloat16, rows, columns};
  parallel_for(rows, grain(columns * m), [&](int64_t begin, int64_t end) {
    chosen()->linear16(w, floats(x), m, floats_of(y), begin,
                     end);
  });
  return y;
}

// Rows a thread takes at least, of elementwise work.
int64_t rows_per_thread(int64_t n) { return 16 * 1024 / std::max<int64_t>(n, 1) + 1; }

// The weight of a norm over x's last dimension.
int64_t expect_norm(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() > 0, "x: expected at least one dimension, got none");
  const int64_t n = x.size(x.dim() - 1);
  expect("weight", weight, ScalarType::Float, {n}, true);
  return n;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const int64_t n = expect_norm(x, weight);
  expect("x", x, ScalarType::Float, shape_of(x), true);
  Tensor y = torch::stable::new_empty(x, shape_of(x));
  const auto* from = floats(x);
  auto* to = floats_of(y);
  parallel_for(n ? x.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->rms_norm(from + begin * n, nullptr, floats(weight),
                     static_cast<float>(eps), to + begin * n, end - begin, n);
  });
  return y;
}

void add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  const int64_t n = expect_norm(x, weight);
  expect("x", x, ScalarType::Float, shape_of(x), true);
  expect("residual", residual, ScalarType::Float, shape_of(x), true);
  auto* values = floats_of(x);
  auto* sums = floats_of(residual);
  parallel_for(n ? x.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->rms_norm(values + begin * n, sums + begin * n, floats(weight),
                     static_cast<float>(eps), values + begin * n, end - begin, n);
  });
}

Tensor silu_and_mul(Tensor x) {
  std::vector<int64_t> shape = shape_of(x);
  expect("x", x, ScalarType::Float, shape, true);
  STD_TORCH_CHECK(!shape.empty() && shape.back() % 2 == 0, "x: expected [..., 2 n], got ", describe(x));
  const int64_t n = shape.back() /= 2;
  Tensor y = torch::stable::new_empty(x, shape);
  parallel_for(n ? y.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->silu_and_mul(floats(x) + begin * 2 * n,
                         floats_of(y) + begin * n, end - begin, n);
  });
  return y;
}

}  // namespace cpu

// The instruction sets that this CPU has kernels for, fastest first, separated by spaces.
std::string cpu_instruction_sets() {
  std::string names;
  for (const auto* kernels : voltserve::cpu::kAll) {
    if (kernels->supported()) names += (names.empty() ? "" : " ") + std::string(kernels->isa);
  }
  return names;
}

// How many threads the CPU's ops use, the caller's included.
void set_cpu_threads(int64_t threads) {
  STD_TORCH_CHECK(threads >= 1, "threads: expected at least 1, got ", threads);
  voltserve::cpu::set_threads(static_cast<int>(threads));
}

// For tests: from now on the ops compute with this instruction set.
void use_cpu_instruction_set(std::string name) {
  for (const auto* kernels : voltserve::cpu::kAll) {
    if (name == kernels->isa && kernels->supported()) {
      cpu::chosen() = kernels;
      return;
    }
  }
  STD_TORCH_CHECK(false, "name: expected one of ", cpu_instruction_sets(), ", got ", name);
}

}  // namespace

STABLE_TORCH_LIBRARY(voltserve, m) {
  m.def("nvfp4_pack(Tensor codes, Tensor block_scales, int group_size) -> (Tensor, Tensor)");
  m.def(
      "nvfp4_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int group_size, Tensor? bias=None) -> "
      "Tensor");
  m.def(
      "nvfp4_dequantize(Tensor packed, Tensor scales, Tensor row_factor, int group_size, ScalarType dtype) -> Tensor");
  // On the CPU only, where stock vLLM has nothing as fast: float32 activations, see cpu/layers.inl.
  m.def("linear16(Tensor x, Tensor weight) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("set_cpu_threads(int threads) -> ()");
  m.def("_cpu_instruction_sets() -> str");
  m.def("_use_cpu_instruction_set(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("nvfp4_pack", TORCH_BOX(&cpu::pack));
  m.impl("nvfp4_linear", TORCH_BOX(&cpu::linear));
  m.impl("nvfp4_dequantize", TORCH_BOX(&cpu::dequantize));
  m.impl("linear16", TORCH_BOX(&cpu::linear16));
  m.impl("rms_norm", TORCH_BOX(&cpu::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&cpu::add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&cpu::silu_and_mul));
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_threads", TORCH_BOX(&set_cpu_threads));
  m.impl("_cpu_instruction_sets", TORCH_BOX(&cpu_instruction_sets));
  m.impl("_use_cpu_instruction_set", TORCH_BOX(&use_cpu_instruction_set));
}
