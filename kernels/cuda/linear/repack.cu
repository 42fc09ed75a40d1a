#include "cuda/linear/repack.cuh"

#include "cuda/linear/launch.h"

namespace voltserve {

cudaError_t launch_repack(const uint8_t *codes, const uint8_t *scales, uint4 *packed, uint8_t *packed_scales, int *first_nan, int n,
                          int k, int group, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const size_t threads = static_cast<size_t>(ceil_div(n, kTileRows)) * ceil_div(k, kTileColumns) * kTileCodes;
  const unsigned blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  if (group == 16) {
    repack_kernel<16><<<blocks, kThreads, 0, stream>>>(codes, scales, packed, packed_scales, first_nan, n, k);
  } else {
    repack_kernel<32><<<blocks, kThreads, 0, stream>>>(codes, scales, packed, packed_scales, first_nan, n, k);
  }
  return cudaGetLastError();
}

}  // namespace voltserve
