// The launcher of the all-reduce. It only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/all_reduce/args.h"

namespace voltserve {

cudaError_t launch_all_reduce(const ReduceArgs &args, int blocks, cudaStream_t stream);

}  // namespace voltserve
