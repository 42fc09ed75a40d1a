// The launchers of the Gated DeltaNet kernels. Each only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "contracts/gdn.h"

namespace voltserve {

// The convolution and the delta rule (contracts/gdn.h); `tokens`: rows of x. D other than 32, 64 or 128 is cudaErrorInvalidValue.
cudaError_t launch_causal_conv1d(const Conv1d<__half> &conv, const Requests &requests, int tokens, cudaStream_t stream);
cudaError_t launch_gated_delta_rule(const DeltaRule<__half> &rule, const Requests &requests, cudaStream_t stream);

}  // namespace voltserve
