#include "cuda/rotate/rotate.cuh"

#include "cuda/rotate/launch.h"

namespace voltserve {

namespace {

template <int kPairs, bool kHalves>
cudaError_t launch(const RotateArgs &args, cudaStream_t stream) {
  const int blocks = ceil_div(args.tokens * (args.q_heads + 2 * args.kv_heads), kRotateWarps);
  if (args.q_weight != nullptr)
    return launch_dependent<rotate_kernel<kPairs, kHalves, true>>(blocks, kRotateThreads, 0, stream, args);
  return launch_dependent<rotate_kernel<kPairs, kHalves, false>>(blocks, kRotateThreads, 0, stream, args);
}

template <int kPairs>
cudaError_t launch(const RotateArgs &args, cudaStream_t stream) {
  return args.halves ? launch<kPairs, true>(args, stream) : launch<kPairs, false>(args, stream);
}

}  // namespace

cudaError_t launch_rotate(const RotateArgs &args, cudaStream_t stream) {
  if (args.head_dim <= 64) return launch<1>(args, stream);
  return args.head_dim <= 128 ? launch<2>(args, stream) : launch<4>(args, stream);
}

}  // namespace voltserve

extern "C" int voltserve_rotate(const voltserve::RotateArgs &args, cudaStream_t stream) {
  return voltserve::launch_rotate(args, stream);
}
