#include "cuda/plain/plain.cuh"

#include <algorithm>

#include "cuda/plain/launch.h"

namespace voltserve {

cudaError_t launch_plain_norm(const PlainNormArgs &args, cudaStream_t stream) {
  constexpr int kWarp = 32 * kPlainChunks * kPlainChunk;  // numbers that a warp holds
  const int threads = std::min(kPlainThreads, (args.width + kWarp - 1) / kWarp * 32);
  plain_norm_kernel<<<static_cast<unsigned>(args.rows), threads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_plain_rotary(const PlainRotaryArgs &args, cudaStream_t stream) {
  plain_rotary_kernel<<<dim3(static_cast<unsigned>(args.tokens), args.heads), 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace voltserve
