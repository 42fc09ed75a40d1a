#include "cuda/attention/decode.cuh"

#include "cuda/attention/launch.h"

namespace voltserve {
namespace {

template <int HEAD_DIM, int ROW_WARPS>
void launch(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  const dim3 grid(plan.splits, args.kv_heads, plan.row_blocks);
  attention_decode_kernel<HEAD_DIM, ROW_WARPS>
      <<<grid, decode_shape(HEAD_DIM, ROW_WARPS).threads(), 0, stream>>>(args, plan.partial_rows);
}

template <int HEAD_DIM>
cudaError_t launch_head(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  switch (plan.decode.row_warps) {
    case 1:
      launch<HEAD_DIM, 1>(args, plan, stream);
      break;
    case 2:
      launch<HEAD_DIM, 2>(args, plan, stream);
      break;
    case 4:
      launch<HEAD_DIM, 4>(args, plan, stream);
      break;
    case 8:
      launch<HEAD_DIM, 8>(args, plan, stream);
      break;
    default:
      return cudaErrorInvalidConfiguration;  // not a shape of plan_attention's
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_decode(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  switch (args.head_dim) {
    case 64:
      return launch_head<64>(args, plan, stream);
    case 80:
      return launch_head<80>(args, plan, stream);
    case 96:
      return launch_head<96>(args, plan, stream);
    case 128:
      return launch_head<128>(args, plan, stream);
    case 256:
      return launch_head<256>(args, plan, stream);
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace voltserve
