#include "cuda/common/layout8.cuh"
#include "cuda/linear/launch_tile.cuh"

namespace voltserve {

cudaError_t launch_linear(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  if (is_fp8(group)) return args.experts == nullptr ? launch_fp8(args, group, plan, stream) : cudaErrorInvalidConfiguration;
  return args.experts != nullptr ? launch_mma_grouped(args, group, plan, stream) : launch_mma(args, group, plan, stream);
}

}  // namespace voltserve
