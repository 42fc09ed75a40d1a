// The launchers of the attention kernels. Each only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention/args.h"
#include "cuda/attention/plan.h"

namespace voltserve {

// The requests of at most kDecodeTokens new tokens (decode.cuh), then the others (prefill.cuh).
cudaError_t launch_attention(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);

cudaError_t launch_decode(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);
cudaError_t launch_prefill(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);

}  // namespace voltserve
