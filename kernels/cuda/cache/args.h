// One call that writes new keys and values into the paged cache: plain C++, no CUDA or torch header, as attention/args.h.
#pragma once

#include <cstdint>

struct __half;

namespace voltserve {

// key and value are [tokens, kv_heads, head_dim], their tokens key_stride and value_stride elements apart. Token t goes to slot slots[t] =
// block * block_size + token in block, or nowhere if that is negative.
struct CacheArgs {
  const __half *key, *value;
  __half *k_cache, *v_cache;
  const int64_t *slots;
  int tokens, kv_heads, head_dim;
  int key_stride, value_stride;
  int block_size, block_chunks, token_chunks, head_chunks;
};

}  // namespace voltserve
