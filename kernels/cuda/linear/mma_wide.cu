#include "cuda/linear/launch_tile.cuh"
#include "cuda/linear/mma.cuh"

namespace voltserve {
namespace {

template <int GROUP>
cudaError_t launch_group(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::mma64:
      return launch_tile<Mma<64, 1>, 1, 2, 2, 2, GROUP>(args, plan, stream);
    case Variant::mma128:
      return launch_tile<Mma<64, 2>, 2, 2, 1, 2, GROUP>(args, plan, stream);
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

cudaError_t launch_mma_wide(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return group == 16 ? launch_group<16>(args, plan, stream) : launch_group<32>(args, plan, stream);
}

}  // namespace voltserve
