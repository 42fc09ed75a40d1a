// The arguments of an op that are a packed weight, checked; and those that name the next product's weight, to be read ahead.
// Included by cuda/*ops.cpp only.
#pragma once

#include <optional>
#include <vector>

#include "ahead.h"
#include "binding.h"
#include "layout.cuh"

namespace voltserve {

// W [N, K] in the packed layout, or E of them one after the other.
struct Matrix {
  const uint4* codes;
  const uint8_t* scales;
  const float* row_factor;
  int64_t n, k;
  int group;
};

// The arguments' names, in errors.
struct WeightNames {
  const char *packed = "packed", *scales = "scales", *row_factor = "row_factor", *group_size = "group_size";
};

inline int64_t padded(int64_t length, int64_t tile) { return (length + tile - 1) / tile * tile; }

// Checks W's tensors; `lead` is [E] for E matrices, empty for one.
inline Matrix matrix(const Call& call, const Tensor& packed, const Tensor& scales, const Tensor& row_factor, int64_t group_size,
                     const std::vector<int64_t>& lead = {}, const WeightNames& names = {}) {
  STD_TORCH_CHECK(group_size == 16 || group_size == 32, names.group_size, ": expected 16 or 32, got ", group_size);
  auto with = [&](std::vector<int64_t> shape) {
    shape.insert(shape.begin(), lead.begin(), lead.end());
    return shape;
  };
  expect(names.row_factor, row_factor, call.place, ScalarType::Float, with({-1}));
  const int64_t n = row_factor.size(row_factor.dim() - 1), rows = padded(n, kTileRows);
  expect(names.scales, scales, call.place, ScalarType::Float8_e4m3fn, with({rows, -1}), Layout::strided);
  const int64_t k = scales.size(scales.dim() - 1) * group_size, columns = padded(k, kTileColumns);
  expect(names.packed, packed, call.place, ScalarType::Byte, with({rows, columns / 2}));
  STD_TORCH_CHECK(scales.stride(scales.dim() - 1) == 1 && scales.stride(scales.dim() - 2) == columns / group_size, names.scales,
                  ": expected the view that nvfp4_pack returned, with row stride ", columns / group_size, ", got ",
                  scales.stride(scales.dim() - 2));
  return {data<const uint4>(packed), data<const uint8_t>(scales), data<const float>(row_factor), n, k,
          static_cast<int>(group_size)};
}

inline Problem problem(const Call& call, int64_t m, const Matrix& w, int64_t experts) {
  return {static_cast<int>(m), static_cast<int>(w.n),  static_cast<int>(w.k),    w.group,
          call.gpu.arch,       call.gpu.processors, static_cast<int>(experts)};
}

// What to read ahead of the next product, of `m` tokens, in a kernel in which `ranks` meet: the four trailing arguments of ops that do
// so, `Tensor? next_codes, Tensor? next_scales, Tensor? next_row_factor, int next_group`, as nvfp4_linear takes them. Nothing
// without `codes`.
inline Ahead next_weight(const Call& call, int ranks, int64_t m, const std::optional<Tensor>& codes, const std::optional<Tensor>& scales,
                         const std::optional<Tensor>& row_factor, int64_t group) {
  if (!codes) return {};
  STD_TORCH_CHECK(scales && row_factor, "next_scales, next_row_factor: expected tensors beside next_codes, got none");
  if (m < 1 || m > kAheadTokens) return {};
  const Matrix w = matrix(call, *codes, *scales, *row_factor, group, {}, {"next_codes", "next_scales", "next_row_factor", "next_group"});
  if (w.n == 0 || w.k == 0) return {};
  return read_ahead(problem(call, m, w, 0), w.codes, w.scales, ahead_bytes(call.gpu.arch, ranks));
}

}  // namespace voltserve
