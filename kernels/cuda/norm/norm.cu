#include "cuda/norm/norm.cuh"

#include "cuda/norm/launch.h"

namespace voltserve {
namespace {

template <int kUnits>
cudaError_t launch(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  if constexpr (kUnits > 1) {
    if (plan.units < kUnits) return launch<kUnits - 1>(args, plan, stream);
  }
  if (args.reduce.ranks < 2) return launch_early<norm_kernel<kUnits, false>>(args.rows, plan.threads, 0, stream, args);
  if constexpr (kUnits <= kNormUnitsOfRanks) return launch_early<norm_kernel<kUnits, true>>(args.rows, plan.threads, 0, stream, args);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_norm(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  return launch<kNormUnits>(args, plan, stream);
}

}  // namespace voltserve
