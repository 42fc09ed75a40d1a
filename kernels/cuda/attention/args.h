// Arguments of attention over a paged cache. Plain C++ without CUDA or torch headers, so that bindings, tools and tests can include it.
#pragma once

#include <cstddef>
#include <cstdint>

struct __half;

namespace voltserve {

// Pointers are device pointers. Request b's new tokens are rows query_start[b] .. query_start[b + 1] - 1 of q and out. They are the
// last of its seq_lens[b] positions, all of whose keys and values are already in the cache. A request without new tokens is skipped.
struct AttentionArgs {
  const __half *q;         // [tokens, q_heads, head_dim], the last two contiguous, tokens q_stride elements apart
  __half *out;             // the same, out_stride elements apart
  const __half *k_cache;   // position p of request b: block block_table[b][p / block_size], token p % block_size
  const __half *v_cache;   // with k_cache's strides
  const int *block_table;  // a row per request, table_stride elements apart
  const int *query_start;  // [requests + 1]
  const int *seq_lens;     // [requests], at most 2^23
  float *partial;          // AttentionPlan::partial_floats
  uint32_t *arrivals;      // AttentionPlan::arrival_words, 0xFFFFFFFF before and after
  int requests, q_heads, kv_heads, head_dim;
  int q_stride, out_stride, table_stride;
  int block_size;                               // a multiple of 8, below 2^14
  int block_chunks, token_chunks, head_chunks;  // strides of the caches in chunks of 16 bytes, fewer than 2^31 in all
  float scale;                                  // of q k^T
  float soft_cap;                               // c tanh(q k scale / c); 0: none
  int window;                                   // a token sees the last `window` positions, itself included; 0: all
};

}  // namespace voltserve
