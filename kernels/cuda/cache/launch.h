// The launcher of the cache kernel. It only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cache/args.h"

namespace voltserve {

// New keys and values into the paged cache (cache.cuh).
cudaError_t launch_reshape_and_cache(const CacheArgs &args, cudaStream_t stream);

}  // namespace voltserve
