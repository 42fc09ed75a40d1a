#include "silu_and_mul.cuh"

#include "launch.h"

namespace voltserve {

cudaError_t launch_silu_and_mul(const SiluArgs &args, const Ahead &ahead, cudaStream_t stream) {
  const int blocks = ceil_div(args.m * (args.n / kSiluChunk), kSiluThreads);
  silu_and_mul_kernel<<<blocks + ahead_parts(ahead, kSiluThreads), kSiluThreads, 0, stream>>>(args, ahead, blocks);
  return cudaGetLastError();
}

}  // namespace voltserve
