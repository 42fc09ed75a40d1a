#include "linear_fma.cuh"

#include "linear_launch.cuh"

namespace voltserve {
namespace {

template <int GROUP>
cudaError_t launch_group(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::fma1: return launch_tile<Fma<1, 2>, 1, 1, 4, 6, GROUP>(args, plan, stream);
    case Variant::fma2: return launch_tile<Fma<2, 2>, 1, 1, 4, 5, GROUP>(args, plan, stream);
    case Variant::fma3: return launch_tile<Fma<3, 2>, 1, 1, 4, 4, GROUP>(args, plan, stream);
    case Variant::fma4: return launch_tile<Fma<4, 2>, 1, 1, 4, 4, GROUP>(args, plan, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

cudaError_t launch_fma(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream) {
  return group == 16 ? launch_group<16>(args, plan, stream) : launch_group<32>(args, plan, stream);
}

}  // namespace voltserve
