#include "cuda/attention/prefill.cuh"

#include "cuda/attention/launch.h"

namespace voltserve {
namespace {

template <int HEAD_DIM>
cudaError_t launch(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  constexpr PrefillShape kShape = prefill_shape(HEAD_DIM);
  static_assert(kShape.shared_bytes() * kShape.blocks_per_processor <= 96 * 1024, "more than a V100's multiprocessor has");
  if constexpr (kShape.shared_bytes() > 48 * 1024) {  // more than a kernel gets unasked
    const cudaError_t error = cudaFuncSetAttribute(attention_prefill_kernel<HEAD_DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   kShape.shared_bytes());
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(plan.prefill_tiles, args.kv_heads);
  attention_prefill_kernel<HEAD_DIM><<<grid, 32 * kShape.warps, kShape.shared_bytes(), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_prefill(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  switch (args.head_dim) {
    case 64:
      return launch<64>(args, plan, stream);
    case 80:
      return launch<80>(args, plan, stream);
    case 96:
      return launch<96>(args, plan, stream);
    case 128:
      return launch<128>(args, plan, stream);
    case 256:
      return launch<256>(args, plan, stream);
    default:
      return cudaErrorInvalidConfiguration;  // plan_attention refuses it
  }
}

cudaError_t launch_attention(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  if (plan.splits > 0) {
    const cudaError_t error = launch_decode(args, plan, stream);
    if (error != cudaSuccess) return error;
  }
  return plan.prefill_tiles > 0 ? launch_prefill(args, plan, stream) : cudaSuccess;
}

}  // namespace voltserve
