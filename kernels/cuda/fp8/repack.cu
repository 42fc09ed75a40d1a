#include "cuda/fp8/repack.cuh"

#include "cuda/fp8/launch.h"

namespace voltserve {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(size_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t launch_fp8_repack(const uint8_t *codes, uint4 *packed, int *nan_row, int n, int k, cudaStream_t stream) {
  const size_t threads = static_cast<size_t>(ceil_div(n, kTileRows)) * ceil_div(k, kTileColumns) * kFp8TileCodes;
  fp8_repack_kernel<<<blocks_of(threads), kThreads, 0, stream>>>(codes, packed, nan_row, n, k);
  return cudaGetLastError();
}

cudaError_t launch_fp8_scales(const float *scales, float *row_factor, half *tile_scales, int n, int k, int group,
                              cudaStream_t stream) {
  const size_t threads = static_cast<size_t>(ceil_div(n, kTileRows)) * kTileRows;
  fp8_scales_kernel<<<blocks_of(threads), kThreads, 0, stream>>>(scales, row_factor, tile_scales, n, k, group);
  return cudaGetLastError();
}

}  // namespace voltserve
