// The launcher of norms (norm.cuh). It only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/norm/args.h"

namespace voltserve {

cudaError_t launch_norm(const NormArgs &args, const NormPlan &plan, cudaStream_t stream);

}  // namespace voltserve
