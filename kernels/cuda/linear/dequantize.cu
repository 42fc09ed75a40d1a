#include "cuda/linear/dequantize.cuh"

#include "cuda/linear/launch.h"

namespace voltserve {

cudaError_t launch_dequantize(const uint4 *packed, const uint8_t *packed_scales, const float *row_factor, half *out, int first_row,
                              int rows, int k, int group, cudaStream_t stream) {
  const dim3 grid(ceil_div(ceil_div(k, kTileColumns), kDequantizeWarps), ceil_div(rows, kTileRows));
  constexpr int kThreads = 32 * kDequantizeWarps;
  const auto kernel = group == 16           ? dequantize_kernel<16>
                      : group == kFp8Rows   ? dequantize_kernel<kFp8Rows>
                      : group == kFp8Blocks ? dequantize_kernel<kFp8Blocks>
                                            : dequantize_kernel<32>;
  kernel<<<grid, kThreads, 0, stream>>>(packed, packed_scales, row_factor, out, first_row, rows, k);
  return cudaGetLastError();
}

}  // namespace voltserve
