#include "linear_launch.cuh"

namespace voltserve {

cudaError_t launch_linear(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  if (args.experts != nullptr) return launch_mma_grouped(args, group, plan, stream);
  return plan.variant <= Variant::fma4 ? launch_fma(args, group, plan, stream) : launch_mma(args, group, plan, stream);
}

}  // namespace voltserve
