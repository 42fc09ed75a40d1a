// New keys and values into the paged cache:
//
//     k_cache[slot / block_size][slot % block_size][h] = key[t][h], and v_cache likewise, for the slot of token t
//
// A token with a negative slot is padding and is written nowhere. A thread copies 16 bytes; no bit changes.
#pragma once

#include "cuda/cache/args.h"
#include "cuda/common/layout.cuh"

namespace voltserve {

constexpr int kCacheThreads = 256;

// Grid: one thread per 16-byte chunk of key.
__global__ void __launch_bounds__(kCacheThreads) reshape_and_cache_kernel(const CacheArgs args) {
  const int chunks = args.kv_heads * args.head_dim / 8;  // per token
  const int i = blockIdx.x * kCacheThreads + threadIdx.x, token = i / chunks;
  if (token >= args.tokens) return;
  const int64_t slot = __ldg(args.slots + token);
  if (slot < 0) return;
  const int chunk = i - token * chunks, head = chunk / (args.head_dim / 8), part = chunk % (args.head_dim / 8);
  const int64_t block = slot / args.block_size;
  const int64_t at = block * args.block_chunks + (slot - block * args.block_size) * args.token_chunks +
                     static_cast<int64_t>(head) * args.head_chunks + part;
  auto read = [&](const half *from, int stride) {
    return __ldg(reinterpret_cast<const uint4 *>(from + static_cast<size_t>(token) * stride) + chunk);
  };
  reinterpret_cast<uint4 *>(args.k_cache)[at] = read(args.key, args.key_stride);
  reinterpret_cast<uint4 *>(args.v_cache)[at] = read(args.value, args.value_stride);
}

}  // namespace voltserve
