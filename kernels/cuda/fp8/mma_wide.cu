// The skeleton of cuda/linear with FP8 weights (common/layout8.cuh), in the shapes of plan.cpp.
#include "cuda/linear/mma.cuh"

#include "cuda/linear/launch_tile.cuh"

namespace voltserve {
namespace {

template <int GROUP>
cudaError_t launch_group(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::mma32:
      return launch_tile<Mma<32, 2>, 1, 1, 4, 2, GROUP>(args, plan, stream);
    case Variant::mma64:
      return launch_tile<Mma<64, 1>, 1, 2, 2, 2, GROUP>(args, plan, stream);
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

cudaError_t launch_fp8_wide(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return group == kFp8Rows ? launch_group<kFp8Rows>(args, plan, stream) : launch_group<kFp8Blocks>(args, plan, stream);
}

}  // namespace voltserve
