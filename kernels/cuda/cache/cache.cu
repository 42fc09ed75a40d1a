#include "cuda/cache/cache.cuh"

#include "cuda/cache/launch.h"

namespace voltserve {

cudaError_t launch_reshape_and_cache(const CacheArgs &args, cudaStream_t stream) {
  const int chunks = args.tokens * args.kv_heads * (args.head_dim / 8);
  reshape_and_cache_kernel<<<ceil_div(chunks, kCacheThreads), kCacheThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace voltserve

extern "C" int voltserve_reshape_and_cache(const voltserve::CacheArgs &args, cudaStream_t stream) {
  return voltserve::launch_reshape_and_cache(args, stream);
}
