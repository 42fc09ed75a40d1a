#include "attention_decode.cuh"

#include "attention_launch.h"

namespace voltserve {
namespace {

template <int LANES, int ROWS, int ROW_WARPS>
void launch(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  const dim3 grid(plan.units, args.kv_heads, plan.row_blocks);
  attention_decode_kernel<LANES, ROWS, ROW_WARPS>
      <<<grid, decode_shape(LANES, ROWS, ROW_WARPS).threads(), 0, stream>>>(args, plan.run_divisor, plan.partial_rows);
}

template <int LANES>
cudaError_t launch_lanes(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  switch (plan.decode.rows * plan.decode.row_warps) {
    case 1: launch<LANES, 1, 1>(args, plan, stream); break;
    case 2: launch<LANES, 2, 1>(args, plan, stream); break;
    case 4: launch<LANES, 4, 1>(args, plan, stream); break;
    case 8: launch<LANES, 8, 1>(args, plan, stream); break;
    case 16: launch<LANES, 8, 2>(args, plan, stream); break;
    case 32: launch<LANES, 8, 4>(args, plan, stream); break;
    case 64: launch<LANES, 8, 8>(args, plan, stream); break;
    default: return cudaErrorInvalidConfiguration;  // not a shape of plan_attention's
  }
  return cudaGetLastError();
}

template <int HEAD_DIM>
cudaError_t launch_combine(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  const dim3 grid(args.requests, args.kv_heads, plan.partial_rows);
  attention_combine_kernel<HEAD_DIM>
      <<<grid, kCombineThreads, 0, stream>>>(args, plan.run_divisor, plan.partial_rows, plan.units, plan.decode.tile());
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_decode(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream) {
  const cudaError_t error = plan.decode.lanes == 8    ? launch_lanes<8>(args, plan, stream)
                            : plan.decode.lanes == 16 ? launch_lanes<16>(args, plan, stream)
                                                      : launch_lanes<32>(args, plan, stream);
  if (error != cudaSuccess) return error;
  switch (args.head_dim) {
    case 64: return launch_combine<64>(args, plan, stream);
    case 80: return launch_combine<80>(args, plan, stream);
    case 96: return launch_combine<96>(args, plan, stream);
    case 128: return launch_combine<128>(args, plan, stream);
    case 256: return launch_combine<256>(args, plan, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace voltserve
