// The launcher of the SiLU kernel. It only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/silu/args.h"

namespace voltserve {

// y = silu(gate) * up (silu_and_mul.cuh).
cudaError_t launch_silu_and_mul(const SiluArgs &args, cudaStream_t stream);

}  // namespace voltserve
