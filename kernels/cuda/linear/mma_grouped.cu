#include "cuda/linear/launch_tile.cuh"
#include "cuda/linear/mma.cuh"

namespace voltserve {
namespace {

template <int GROUP>
cudaError_t launch_group(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::mma8:
      return launch_tile<Mma<8, 2>, 1, 1, 4, 4, GROUP, true>(args, plan, stream);
    case Variant::mma16:
      return launch_tile<Mma<16, 2>, 1, 1, 4, 3, GROUP, true>(args, plan, stream);
    case Variant::mma32:
      return launch_tile<Mma<32, 2>, 1, 1, 4, 2, GROUP, true>(args, plan, stream);
    case Variant::mma64:
      return launch_tile<Mma<64, 1>, 1, 2, 2, 2, GROUP, true>(args, plan, stream);
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

cudaError_t launch_mma_grouped(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return group == 16 ? launch_group<16>(args, plan, stream) : launch_group<32>(args, plan, stream);
}

}  // namespace voltserve
