#include "norm.cuh"

#include "norm_launch.h"

namespace voltserve {
namespace {

template <int kUnits>
cudaError_t launch(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  if constexpr (kUnits > 1) {
    if (plan.units < kUnits) return launch<kUnits - 1>(args, plan, stream);
  }
  const int blocks = args.rows + ahead_parts(args.ahead, plan.threads);
  if (args.reduce.ranks > 1) return launch_early<norm_kernel<kUnits, true>>(blocks, plan.threads, 0, stream, args);
  return launch_early<norm_kernel<kUnits, false>>(blocks, plan.threads, 0, stream, args);
}

}  // namespace

cudaError_t launch_norm(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  return launch<kNormUnits>(args, plan, stream);
}

}  // namespace voltserve
