#include "cuda/norm/norm.cuh"

#include "cuda/norm/launch.h"

namespace voltserve {
namespace {

template <int kVectors>
cudaError_t launch(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  if constexpr (kVectors > 1) {
    if (plan.vectors < kVectors) return launch<kVectors - 1>(args, plan, stream);
  }
  if (args.reduce.ranks < 2) return launch_dependent<norm_kernel<kVectors, false>>(args.rows, plan.threads, 0, stream, args);
  if constexpr (kVectors <= kNormVectorsOfRanks)
    return launch_dependent<norm_kernel<kVectors, true>>(args.rows, plan.threads, 0, stream, args);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_norm(const NormArgs &args, const NormPlan &plan, cudaStream_t stream) {
  return launch<kNormVectors>(args, plan, stream);
}

}  // namespace voltserve
