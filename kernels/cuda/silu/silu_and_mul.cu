#include "cuda/silu/silu_and_mul.cuh"

#include "cuda/silu/launch.h"

namespace voltserve {

cudaError_t launch_silu_and_mul(const SiluArgs &args, cudaStream_t stream) {
  const int blocks = ceil_div(args.m * (args.n / kSiluChunk), kSiluThreads);
  return launch_dependent<silu_and_mul_kernel>(blocks, kSiluThreads, 0, stream, args);
}

}  // namespace voltserve

extern "C" int voltserve_silu_and_mul(const voltserve::SiluArgs &args, cudaStream_t stream) {
  return voltserve::launch_silu_and_mul(args, stream);
}
