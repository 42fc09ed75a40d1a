// What lies between the product that makes query, key and value, and attention: plain C++, no CUDA or torch header, as attention/args.h.
#pragma once

#include <cstdint>

struct __half;

namespace voltserve {

// Tokens of q, key and value are their strides apart, a token's heads side by side. Token t goes to slot slots[t] = block * block_size
// + token in block of the caches, whose strides are in 16 bytes; nowhere if that is negative, or t is not below `cached`.
struct RotateArgs {
  __half *q;                          // [tokens, q_heads, head_dim], rotated in place
  const __half *key, *value;          // [tokens, kv_heads, head_dim]
  const __half *q_weight, *k_weight;  // [head_dim]: of a norm of each head before the rotation; null: none
  const int64_t *positions;           // [tokens]
  const __half *cos_sin;              // [any, rotated]: cos of a position's rotated / 2 angles, then sin
  __half *k_cache, *v_cache;
  const int64_t *slots;  // [cached]
  int tokens, cached, q_heads, kv_heads, head_dim, rotated;
  int q_stride, key_stride, value_stride;
  int block_size, block_chunks, token_chunks, head_chunks;
  float eps;
  int halves;  // whether an angle turns dimensions rotated / 2 apart (GPT-NeoX), or neighbours (GPT-J)
};

}  // namespace voltserve
