// torch.ops.voltserve.nvfp4_* and their neighbours: schemas for all devices, and the ops on the CPU with their checks and allocations.
// cuda/*/ops.cpp has the implementations on CUDA. Built on torch's stable ABI, so one shared object serves torch 2.10 and later and
// every Python. The contract is contracts/nvfp4.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

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
#include "cuda/linear/plan.h"
#include "bindings/arguments.h"
#include "contracts/nvfp4.h"

const voltserve::cpu::Kernels *&voltserve::cpu::chosen() {
  static const Kernels *kernels = *std::find_if(std::begin(kAll), std::end(kAll), [](auto *one) { return one->supported(); });
  return kernels;
}

namespace {

using namespace voltserve;

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};

Tensor in_float(const Tensor &tensor) {
  return torch::stable::contiguous(tensor.scalar_type() == ScalarType::Float ? tensor
                                                                             : torch::stable::to(tensor, ScalarType::Float));
}

const float *floats(const Tensor &tensor) { return static_cast<const float *>(tensor.const_data_ptr()); }
float *floats_of(Tensor &tensor) { return static_cast<float *>(tensor.mutable_data_ptr()); }

namespace on_cpu {

using namespace voltserve::cpu;

std::tuple<Tensor, Tensor> pack(Tensor codes, Tensor block_scales, int64_t group_size) {
  expect_group_size(group_size);
  expect("codes", codes, kCpu, ScalarType::Byte, {-1, -1});
  const int64_t rows = codes.size(0), columns = 2 * codes.size(1), groups = columns / group_size;
  expect_multiple("codes", "K", columns, group_size);
  expect("block_scales", block_scales, kCpu, ScalarType::Float8_e4m3fn, {rows, groups});
  const auto *scale_bytes = static_cast<const uint8_t *>(block_scales.const_data_ptr());
  for (int64_t i = 0; i < rows * groups; ++i) {
    STD_TORCH_CHECK((scale_bytes[i] & kE4m3Nan) != kE4m3Nan, "block_scales: expected numbers, got NaN at [", i / groups, ", ",
                    i % groups, "]");
  }
  const int64_t tiles = tiles_of(rows);
  Tensor packed = torch::stable::new_empty(codes, {tiles * kTileRows, columns / 2});
  Tensor scales = torch::stable::new_empty(block_scales, {tiles * kTileRows, groups});
  parallel_for(tiles, grain(kTileRows * columns), [&](int64_t begin, int64_t end) {
    voltserve::cpu::pack(static_cast<const uint8_t *>(codes.const_data_ptr()), scale_bytes, rows, columns,
                         static_cast<int>(group_size), static_cast<uint8_t *>(packed.mutable_data_ptr()),
                         static_cast<uint8_t *>(scales.mutable_data_ptr()), begin, end);
  });
  return {packed, scales};
}

Nvfp4Matrix matrix(const Tensor &packed, const Tensor &scales, const Tensor &row_factor, int64_t group_size) {
  expect_group_size(group_size);
  expect("row_factor", row_factor, kCpu, ScalarType::Float, {-1});
  const int64_t rows = row_factor.size(0), padded = tiles_of(rows) * kTileRows;
  expect("scales", scales, kCpu, ScalarType::Float8_e4m3fn, {padded, -1});
  const int64_t columns = scales.size(1) * group_size;
  expect("packed", packed, kCpu, ScalarType::Byte, {padded, columns / 2});
  return {static_cast<const uint8_t *>(packed.const_data_ptr()),
          static_cast<const uint8_t *>(scales.const_data_ptr()),
          floats(row_factor),
          rows,
          columns,
          static_cast<int>(group_size)};
}

Tensor linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, std::optional<Tensor> bias) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_dtype("x", x.scalar_type(), kFloats);
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
    chosen()->linear(w, floats(from), m, add ? floats(*add) : nullptr, floats_of(y), begin, end);
  });
  return x.scalar_type() == ScalarType::Float ? y : torch::stable::to(y, x.scalar_type());
}

// Consecutive token blocks of one expert: `rows` gathered activations from `first` on.
struct Run {
  int64_t expert, first, rows;
};

Tensor moe_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, Tensor slots, Tensor experts,
                  Tensor padded_slots, int64_t top_k) {
  expect_group_size(group_size);
  expect("row_factor", row_factor, kCpu, ScalarType::Float, {-1, -1});
  const int64_t count = row_factor.size(0), n = row_factor.size(1), padded = tiles_of(n) * kTileRows;
  expect("scales", scales, kCpu, ScalarType::Float8_e4m3fn, {count, padded, -1});
  const int64_t groups = scales.size(2), columns = groups * group_size;
  expect("packed", packed, kCpu, ScalarType::Byte, {count, padded, columns / 2});
  expect_dtype("x", x.scalar_type(), kFloats);
  expect("x", x, kCpu, x.scalar_type(), {-1, columns});
  expect("slots", slots, kCpu, ScalarType::Int, {-1});
  expect("experts", experts, kCpu, ScalarType::Int, {-1});
  expect("padded_slots", padded_slots, kCpu, ScalarType::Int, {1});
  expect_at_least("top_k", top_k, 1);
  const int64_t blocks = experts.size(0), block = blocks ? slots.size(0) / blocks : 0, m = x.size(0);
  STD_TORCH_CHECK(slots.size(0) == blocks * block, "slots: expected as many for each of the ", blocks, " blocks, got ",
                  slots.size(0));
  const int64_t used = *static_cast<const int32_t *>(padded_slots.const_data_ptr());
  STD_TORCH_CHECK(used >= 0 && used <= slots.size(0), "padded_slots: expected 0 to ", slots.size(0), ", got ", used);

  const auto *slot_of = static_cast<const int32_t *>(slots.const_data_ptr());
  const auto *expert_of = static_cast<const int32_t *>(experts.const_data_ptr());
  std::vector<Run> runs;
  std::vector<int64_t> gathered;  // slots without padding
  for (int64_t i = 0; i < used; ++i) {
    const int64_t expert = expert_of[i / block], slot = slot_of[i];
    STD_TORCH_CHECK(expert >= 0 && expert < count, "experts: expected 0 to ", count - 1, ", got ", expert);
    STD_TORCH_CHECK(slot >= 0, "slots: expected at least 0, got ", slot);
    if (slot >= m * top_k) continue;
    if (runs.empty() || runs.back().expert != expert) runs.push_back({expert, static_cast<int64_t>(gathered.size()), 0});
    ++runs.back().rows;
    gathered.push_back(slot);
  }

  const Tensor from = in_float(x);
  const int64_t rows = gathered.size(), tiles = tiles_of(n);
  Tensor in = torch::stable::new_empty(from, {rows, columns}), out = torch::stable::new_empty(from, {rows, n});
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(floats(from) + gathered[i] / top_k * columns, columns, floats_of(in) + i * columns);
  }
  const int64_t per_run = runs.empty() ? 1 : rows / static_cast<int64_t>(runs.size());
  parallel_for(runs.size() * tiles, grain(kTileRows * columns * per_run), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const Run &run = runs[at / tiles];
      const int64_t tile = at % tiles, stop = std::min(tiles, tile + end - at);
      const Nvfp4Matrix w = {static_cast<const uint8_t *>(packed.const_data_ptr()) + run.expert * padded * columns / 2,
                             static_cast<const uint8_t *>(scales.const_data_ptr()) + run.expert * padded * groups,
                             floats(row_factor) + run.expert * n,
                             n,
                             columns,
                             static_cast<int>(group_size)};
      chosen()->linear(w, floats(in) + run.first * columns, run.rows, nullptr, floats_of(out) + run.first * n, tile, stop);
      at += stop - tile;
    }
  });
  Tensor y = torch::stable::new_empty(from, {m * top_k, n});
  for (int64_t i = 0; i < rows; ++i) std::copy_n(floats(out) + i * n, n, floats_of(y) + gathered[i] * n);
  return x.scalar_type() == ScalarType::Float ? y : torch::stable::to(y, x.scalar_type());
}

Tensor dequantize(Tensor packed, Tensor scales, Tensor row_factor, int64_t group_size, ScalarType dtype) {
  const Nvfp4Matrix w = matrix(packed, scales, row_factor, group_size);
  expect_dtype("dtype", dtype, kFloats);
  Tensor out = torch::stable::new_empty(row_factor, {w.rows, w.columns});
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns),
               [&](int64_t begin, int64_t end) { chosen()->dequantize(w, floats_of(out), begin, end); });
  return dtype == ScalarType::Float ? out : torch::stable::to(out, dtype);
}

Tensor linear16(Tensor x, Tensor weight) {
  const auto dtype = weight.scalar_type();
  expect_dtype("weight", dtype, {ScalarType::Half, ScalarType::BFloat16});
  expect("weight", weight, kCpu, dtype, {-1, -1});
  const int64_t rows = weight.size(0), columns = weight.size(1);
  expect_multiple("weight", "K", columns, kLinear16Columns);
  expect("x", x, kCpu, ScalarType::Float, {-1, columns});
  const int64_t m = x.size(0);
  Tensor y = torch::stable::new_empty(x, {m, rows});
  const Linear16 w = {static_cast<const uint16_t *>(weight.const_data_ptr()), dtype == ScalarType::BFloat16, rows, columns};
  parallel_for(rows, grain(columns * m),
               [&](int64_t begin, int64_t end) { chosen()->linear16(w, floats(x), m, floats_of(y), begin, end); });
  return y;
}

// The fewest rows per thread for elementwise work.
int64_t rows_per_thread(int64_t n) { return 16 * 1024 / std::max<int64_t>(n, 1) + 1; }

// The weight of a norm over x's last dimension.
int64_t expect_norm(const Tensor &x, const Tensor &weight) {
  STD_TORCH_CHECK(x.dim() > 0, "x: expected at least one dimension, got none");
  const int64_t n = x.size(x.dim() - 1);
  expect("weight", weight, kCpu, ScalarType::Float, {n});
  return n;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const int64_t n = expect_norm(x, weight);
  expect("x", x, kCpu, ScalarType::Float, shape_of(x));
  Tensor y = torch::stable::new_empty(x, shape_of(x));
  const auto *from = floats(x);
  auto *to = floats_of(y);
  parallel_for(n ? x.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->rms_norm(from + begin * n, nullptr, floats(weight), static_cast<float>(eps), to + begin * n, end - begin, n);
  });
  return y;
}

void add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  const int64_t n = expect_norm(x, weight);
  expect("x", x, kCpu, ScalarType::Float, shape_of(x));
  expect("residual", residual, kCpu, ScalarType::Float, shape_of(x));
  auto *values = floats_of(x);
  auto *sums = floats_of(residual);
  parallel_for(n ? x.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->rms_norm(values + begin * n, sums + begin * n, floats(weight), static_cast<float>(eps), values + begin * n,
                       end - begin, n);
  });
}

Tensor silu_and_mul(Tensor x) {
  std::vector<int64_t> shape = shape_of(x);
  expect("x", x, kCpu, ScalarType::Float, shape);
  STD_TORCH_CHECK(!shape.empty() && shape.back() % 2 == 0, "x: expected [..., 2 n], got ", describe(x));
  const int64_t n = shape.back() /= 2;
  Tensor y = torch::stable::new_empty(x, shape);
  parallel_for(n ? y.numel() / n : 0, rows_per_thread(n), [&](int64_t begin, int64_t end) {
    chosen()->silu_and_mul(floats(x) + begin * 2 * n, floats_of(y) + begin * n, end - begin, n);
  });
  return y;
}

}  // namespace on_cpu

// The instruction sets that this CPU has kernels for, fastest first, separated by spaces.
std::string cpu_instruction_sets() {
  std::string names;
  for (const auto *kernels : voltserve::cpu::kAll) {
    if (kernels->supported()) names += (names.empty() ? "" : " ") + std::string(kernels->isa);
  }
  return names;
}

// The path that cuda/linear/plan.h picks for a GEMM on a GPU, and why. Needs no GPU, so `voltserve explain` can ask before there is one.
std::string cuda_route(int64_t m, int64_t n, int64_t k, int64_t group_size, int64_t arch, int64_t processors) {
  auto narrow = [](int64_t value) { return static_cast<int>(value); };
  const Plan chosen = plan({narrow(m), narrow(n), narrow(k), narrow(group_size), narrow(arch), narrow(processors), 0});
  const char *path = chosen.path == Path::dequantize ? "dequantize + cuBLAS" : shape(chosen.variant).name;
  return std::string(path) + ": " + chosen.reason;
}

// How many threads the CPU's ops use, the caller's included.
void set_cpu_threads(int64_t threads) {
  expect_at_least("threads", threads, 1);
  voltserve::cpu::set_threads(static_cast<int>(threads));
}

// For tests: makes the ops use this instruction set from now on.
void use_cpu_instruction_set(std::string name) {
  for (const auto *kernels : voltserve::cpu::kAll) {
    if (name == kernels->isa && kernels->supported()) {
      voltserve::cpu::chosen() = kernels;
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
  m.def("nvfp4_dequantize(Tensor packed, Tensor scales, Tensor row_factor, int group_size, ScalarType dtype) -> Tensor");
  m.def(
      "nvfp4_moe_linear(Tensor x, Tensor packed, Tensor scales, Tensor row_factor, int group_size, Tensor slots, Tensor "
      "experts, Tensor padded_slots, int top_k) -> Tensor");
  // Where stock vLLM has nothing as fast: on the CPU with float32 activations, see cpu/layers.inl; silu_and_mul on GPUs in fp16.
  m.def("linear16(Tensor x, Tensor weight) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  // On GPUs only, see cuda/plain/plain.cuh.
  m.def("rms_norm_to(Tensor(a!) y, Tensor x, Tensor weight, float eps) -> ()");
  m.def("rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin, bool halves) -> ()");
  m.def("set_cpu_threads(int threads) -> ()");
  m.def("_cpu_instruction_sets() -> str");
  m.def("_cuda_route(int m, int n, int k, int group_size, int arch, int processors) -> str");
  m.def("_use_cpu_instruction_set(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("nvfp4_pack", TORCH_BOX(&on_cpu::pack));
  m.impl("nvfp4_linear", TORCH_BOX(&on_cpu::linear));
  m.impl("nvfp4_moe_linear", TORCH_BOX(&on_cpu::moe_linear));
  m.impl("nvfp4_dequantize", TORCH_BOX(&on_cpu::dequantize));
  m.impl("linear16", TORCH_BOX(&on_cpu::linear16));
  m.impl("rms_norm", TORCH_BOX(&on_cpu::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&on_cpu::add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&on_cpu::silu_and_mul));
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_threads", TORCH_BOX(&set_cpu_threads));
  m.impl("_cpu_instruction_sets", TORCH_BOX(&cpu_instruction_sets));
  m.impl("_cuda_route", TORCH_BOX(&cuda_route));
  m.impl("_use_cpu_instruction_set", TORCH_BOX(&use_cpu_instruction_set));
}
