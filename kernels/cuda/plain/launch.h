// The launchers of the plain layers' kernels. They only launch, on the stream given, and return the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plain/args.h"

namespace voltserve {

cudaError_t launch_plain_norm(const PlainNormArgs &args, cudaStream_t stream);
cudaError_t launch_plain_rotary(const PlainRotaryArgs &args, cudaStream_t stream);

}  // namespace voltserve
