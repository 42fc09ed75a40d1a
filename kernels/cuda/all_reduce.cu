#include "all_reduce.cuh"

#include "all_reduce_launch.h"

namespace voltserve {

cudaError_t launch_all_reduce(const ReduceArgs &args, const ReducePlan &plan, cudaStream_t stream) {
  const auto kernel = plan.protocol == Protocol::lines
                          ? (args.half ? all_reduce_lines_kernel<__half> : all_reduce_lines_kernel<float>)
                          : (args.half ? all_reduce_chunks_kernel<__half> : all_reduce_chunks_kernel<float>);
  kernel<<<plan.blocks, kReduceThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace voltserve
