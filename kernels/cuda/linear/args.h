// Arguments of the fused linear kernels. Plain C++ without CUDA or torch headers, so that bindings, tools and tests can include it.
#pragma once

#include <cstddef>
#include <cstdint>

struct __half;

namespace voltserve {

// Pointers are device pointers; linear.cuh gives the shapes. `slots` and what follows are for grouped calls only.
struct LinearArgs {
  const __half *x;
  const struct uint4 *codes;
  const uint8_t *scales;
  const float *row_factor;
  const __half *bias;  // or null
  __half *y;
  uint32_t *workspace;  // Plan::workspace_words words, all 0xFFFFFFFF before and after a call
  int m, n, k;
  int x_stride;  // elements between rows of x, a multiple of 8
  const int *slots;
  const int *experts;
  const int *padded_slots;
  int top_k;
};

}  // namespace voltserve
