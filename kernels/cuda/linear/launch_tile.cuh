// Launches one instantiation of linear_kernel. Each mma*.cu instantiates one family, so that they compile side by side.
#pragma once

#include "cuda/linear/launch.h"
#include "cuda/linear/linear.cuh"

namespace voltserve {

// MIN_BLOCKS: blocks per multiprocessor that a V100's registers must hold.
template <class Math, int WM, int WN, int WK, int MIN_BLOCKS, int GROUP, bool GROUPED = false>
cudaError_t launch_tile(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  using T = Tile<Math, WM, WN, WK, GROUP>;
  static_assert(T::kSharedBytes <= 48 * 1024, "more than a kernel gets by default");
  static_assert(T::kSharedBytes * MIN_BLOCKS <= 96 * 1024, "more than a V100's multiprocessor has");
  const Shape &planned = shape(plan.variant);
  if (planned.tokens != T::kTokens || planned.rows != T::kRows || planned.threads != T::kThreads || planned.stage_tiles != T::kWK ||
      planned.blocks_per_processor != MIN_BLOCKS) {
    return cudaErrorInvalidConfiguration;  // the table in plan.cpp disagrees with the instantiations
  }
  const Work work(args.n, args.k, T::kRows, T::kWK, ceil_div(args.m, T::kTokens), plan.blocks);
  constexpr auto kernel = linear_kernel<Math, T, MIN_BLOCKS, GROUPED>;
  if constexpr (!GROUPED) return launch_dependent<kernel>(plan.blocks, T::kThreads, T::kSharedBytes, stream, args, work);
  kernel<<<plan.blocks, T::kThreads, T::kSharedBytes, stream>>>(args, work);
  return cudaGetLastError();
}

cudaError_t launch_mma(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);
cudaError_t launch_mma_wide(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);
cudaError_t launch_fp8(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);
cudaError_t launch_fp8_wide(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);
cudaError_t launch_mma_grouped(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);

}  // namespace voltserve
