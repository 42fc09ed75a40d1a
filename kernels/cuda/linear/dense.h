// What the ops of linears on CUDA tensors share: x as kernels read it, and products with fp16 weights by cuBLAS.
#pragma once

#include <cuda_fp16.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "bindings/arguments.h"
#include "cuda/common/binding.h"
#include "cuda/common/layout.cuh"

namespace voltserve {

// fp16 weights that exist at a time on the way to cuBLAS.
constexpr int64_t kDequantizedBytes = 64 << 20;

inline const __half *halves(const Tensor &tensor) { return data<const __half>(tensor); }

inline int64_t padded(int64_t length, int64_t tile) { return (length + tile - 1) / tile * tile; }

// x in this shape. An operator of torch's costs the host as much as a launch, so none is called for nothing.
inline Tensor shaped(const Tensor &x, const std::vector<int64_t> &shape) {
  return shape_of(x) == shape ? x : torch::stable::reshape(x, shape);
}

// x as the kernels read it: [M, K], elements of a row together, rows 16-byte aligned.
inline Tensor readable(const Tensor &x, int64_t k) {
  int64_t m = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) m *= x.size(d);
  const Tensor flat = shaped(x, {m, k});
  const bool aligned = reinterpret_cast<uintptr_t>(flat.data_ptr()) % 16 == 0;
  if (flat.stride(1) == 1 && (flat.stride(0) % 8 == 0 || m == 1) && aligned) return flat;
  return torch::stable::clone(torch::stable::contiguous(flat));
}

// y[:, first : first + rows] = x w^T on cuBLAS, w [rows, K] fp16.
inline void multiply_dense(const Tensor &x, const Tensor &w, const Tensor &y, int64_t first) {
  Tensor columns = torch::stable::narrow(const_cast<Tensor &>(y), 1, first, w.size(0));
  StableIValue stack[3] = {torch::stable::detail::from(x), torch::stable::detail::from(torch::stable::transpose(w, 0, 1)),
                           torch::stable::detail::from(columns)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

// y [M, n] = x W^T by way of fp16 weights and cuBLAS, a tile of W [n, k] at a time. `dequantize(first, rows)` writes rows `first` .. of W.
template <class Dequantize>
void multiply_in_tiles(const Call &call, const Tensor &x, int64_t n, int64_t k, const Tensor &y, Dequantize dequantize) {
  const int64_t step = std::max<int64_t>(kTileRows, kDequantizedBytes / (2 * k) / kTileRows * kTileRows);
  Tensor scratch = empty(call, x, {std::min(step, n), k});
  for (int64_t first = 0; first < n; first += step) {
    const Tensor rows = torch::stable::narrow(scratch, 0, 0, std::min(step, n - first));
    dequantize(first, rows);
    multiply_dense(x, rows, y, first);
  }
}

}  // namespace voltserve
