// The fused kernel without its arithmetic: packed weights, skeleton, staging, shares and sums as in cuda/linear/linear.cuh. Codes
// and scales are only xor-ed. Its time is what the kernel's memory side allows, also on GPUs that emulate mma.m8n8k4 or where the
// arithmetic is the bound. It gives sass_model.py points that memory bounds. Its output means nothing.
#include <cuda_runtime.h>

#include "cuda/linear/linear.cuh"
#include "cuda/linear/plan.h"

namespace voltserve {
namespace {

template <int TOKENS>
struct Touch {
  template <int GROUP>
  using Weights = LaneTile<GROUP>;
  static constexpr int kTokens = TOKENS, kRowTiles = 2;
  static constexpr int kParts = 1, kPartTokens = TOKENS;

  unsigned seen[kRowTiles] = {};

  static __device__ int token(int) { return 0; }

  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply(const half *x, LaneTile<GROUP> (&tiles)[kRowTiles], int lane, Reload reload) {
    const unsigned activation = *reinterpret_cast<const unsigned *>(x + lane * 2);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      seen[r] ^= tiles[r].scales ^ activation;
      reload.scales(r);
#pragma unroll
      for (int word = 0; word < 8; ++word) {
        seen[r] ^= tiles[r].word(word);
        if (word % 4 == 3) reload.part(r, word / 4);
      }
    }
  }

  template <class Visit>
  __device__ void part(int, int lane, Visit visit) const {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) visit(t, r * kTileRows + lane, static_cast<float>(seen[r] & 0xFF));
    }
  }
};

template <int TOKENS, int MIN_BLOCKS>
cudaError_t launch_touch(const LinearArgs &args, const Plan &plan, cudaStream_t stream) {
  using T = Tile<Touch<TOKENS>, 1, 1, 4, 16>;
  const Work work(args.n, args.k, T::kRows, T::kWK, ceil_div(args.m, T::kTokens), plan.blocks);
  linear_kernel<Touch<TOKENS>, T, MIN_BLOCKS, false><<<plan.blocks, T::kThreads, T::kSharedBytes, stream>>>(args, work);
  return cudaGetLastError();
}

}  // namespace
}  // namespace voltserve

// As voltserve_linear, for the variants mma2 and mma8 and groups of 16.
extern "C" int voltserve_memory_side(const voltserve::LinearArgs *args, int group, const voltserve::Plan *plan,
                                     cudaStream_t stream) {
  using namespace voltserve;
  if (group != 16) return cudaErrorInvalidConfiguration;
  if (plan->variant == Variant::mma2) return launch_touch<2, 5>(*args, *plan, stream);
  if (plan->variant == Variant::mma8) return launch_touch<8, 4>(*args, *plan, stream);
  return cudaErrorInvalidConfiguration;
}
