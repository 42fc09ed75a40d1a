// The launcher of the rotation kernel. It only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/rotate/args.h"

namespace voltserve {

// Queries rotated in place, rotated keys and values into the paged cache (rotate.cuh).
cudaError_t launch_rotate(const RotateArgs &args, cudaStream_t stream);

}  // namespace voltserve
