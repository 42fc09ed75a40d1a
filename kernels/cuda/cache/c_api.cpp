// The cache's launcher as plain C, as linear/c_api.cpp's are (tools/native_attention.py mirrors the struct).
#include "cuda/common/c_structs.h"
#include "cuda/cache/launch.h"

extern "C" {

// The struct of this interface (common/c_structs.h).
const char *voltserve_cache_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("CacheArgs", sizeof(CacheArgs),
               {AT(CacheArgs, key), AT(CacheArgs, value), AT(CacheArgs, k_cache), AT(CacheArgs, v_cache), AT(CacheArgs, slots),
                AT(CacheArgs, tokens), AT(CacheArgs, kv_heads), AT(CacheArgs, head_dim), AT(CacheArgs, key_stride),
                AT(CacheArgs, value_stride), AT(CacheArgs, block_size), AT(CacheArgs, block_chunks), AT(CacheArgs, token_chunks),
                AT(CacheArgs, head_chunks)});
  return text.c_str();
}

int voltserve_reshape_and_cache(const voltserve::CacheArgs *args, cudaStream_t stream) {
  return voltserve::launch_reshape_and_cache(*args, stream);
}

}  // extern "C"
