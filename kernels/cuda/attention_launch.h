// The launchers of the attention kernels. Each only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "attention.h"
#include "attention_plan.h"
#include "rotate.h"

namespace voltserve {

// The requests of at most kDecodeTokens new tokens (attention_decode.cuh), then the others (attention_prefill.cuh).
cudaError_t launch_attention(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);

cudaError_t launch_decode(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);
cudaError_t launch_prefill(const AttentionArgs &args, const AttentionPlan &plan, cudaStream_t stream);

// New keys and values into the paged cache (cache.cuh).
cudaError_t launch_reshape_and_cache(const CacheArgs &args, cudaStream_t stream);

// The same of rotated keys, and queries rotated in place (rotate.cuh).
cudaError_t launch_rotate(const RotateArgs &args, cudaStream_t stream);

}  // namespace voltserve
