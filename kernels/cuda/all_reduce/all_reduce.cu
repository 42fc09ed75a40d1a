#include "cuda/all_reduce/all_reduce.cuh"

#include "cuda/all_reduce/launch.h"

namespace voltserve {

cudaError_t launch_all_reduce(const ReduceArgs &args, int blocks, cudaStream_t stream) {
  const auto kernel = args.half ? all_reduce_kernel<__half> : all_reduce_kernel<float>;
  kernel<<<blocks, kReduceThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace voltserve
