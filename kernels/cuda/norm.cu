#include "norm.cuh"

#include "norm_launch.h"

namespace voltserve {
namespace {

template <int kUnits>
void launch(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  if constexpr (kUnits > 1) {
    if (plan.units < kUnits) return launch<kUnits - 1>(args, plan, stream);
  }
  const auto kernel = args.reduce.ranks > 1 ? norm_kernel<kUnits, true> : norm_kernel<kUnits, false>;
  kernel<<<args.rows + ahead_parts(args.ahead, plan.threads), plan.threads, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_norm(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  launch<kNormUnits>(args, plan, stream);
  return cudaGetLastError();
}

}  // namespace voltserve
