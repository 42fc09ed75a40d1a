#include "cuda/linear/launch_tile.cuh"

namespace voltserve {

cudaError_t launch_linear(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return args.experts != nullptr ? launch_mma_grouped(args, group, plan, stream) : launch_mma(args, group, plan, stream);
}

}  // namespace voltserve
