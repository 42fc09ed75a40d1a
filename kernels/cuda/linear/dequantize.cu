#include "cuda/linear/dequantize.cuh"

#include "cuda/linear/launch.h"

namespace voltserve {

cudaError_t launch_dequantize(const uint4 *packed, const uint8_t *packed_scales, const float *row_factor, half *out, int first_row,
                              int rows, int k, int group, cudaStream_t stream) {
  const dim3 grid(ceil_div(ceil_div(k, kTileColumns), kDequantizeWarps), ceil_div(rows, kTileRows));
  constexpr int kThreads = 32 * kDequantizeWarps;
  if (group == 16) {
    dequantize_kernel<16><<<grid, kThreads, 0, stream>>>(packed, packed_scales, row_factor, out, first_row, rows, k);
  } else {
    dequantize_kernel<32><<<grid, kThreads, 0, stream>>>(packed, packed_scales, row_factor, out, first_row, rows, k);
  }
  return cudaGetLastError();
}

}  // namespace voltserve
