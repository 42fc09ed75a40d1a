#include "rotate.cuh"

#include "attention_launch.h"

namespace voltserve {

cudaError_t launch_rotate(const RotateArgs &args, const Ahead &ahead, cudaStream_t stream) {
  const int blocks = ceil_div(args.tokens * (args.q_heads + 2 * args.kv_heads), kRotateWarps);
  rotate_kernel<<<blocks + ahead_parts(ahead, kRotateThreads), kRotateThreads, 0, stream>>>(args, ahead, blocks);
  return cudaGetLastError();
}

}  // namespace voltserve
