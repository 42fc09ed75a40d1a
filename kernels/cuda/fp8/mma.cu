// The skeleton of cuda/linear with FP8 weights (common/layout8.cuh), in the shapes of plan.cpp.
#include "cuda/linear/mma.cuh"

#include "cuda/linear/launch_tile.cuh"

namespace voltserve {
namespace {

template <int GROUP>
cudaError_t launch_group(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::mma4:
      return launch_tile<Mma<4, 2>, 1, 1, 4, 4, GROUP>(args, plan, stream);
    case Variant::mma8:
      return launch_tile<Mma<8, 2>, 1, 1, 4, 4, GROUP>(args, plan, stream);
    case Variant::mma16:
      return launch_tile<Mma<16, 2>, 1, 1, 4, 3, GROUP>(args, plan, stream);
    default:
      return launch_fp8_wide(args, GROUP, plan, stream);
  }
}

}  // namespace

cudaError_t launch_fp8(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return group == kFp8Rows ? launch_group<kFp8Rows>(args, plan, stream) : launch_group<kFp8Blocks>(args, plan, stream);
}

}  // namespace voltserve
