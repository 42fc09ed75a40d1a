// Arguments of the kernel between the QKV GEMM and attention. Plain C++ without CUDA or torch headers, as attention/args.h.
#pragma once

#include <cstdint>

struct __half;

namespace voltserve {

// Tokens of q, key and value lie a stride apart, and a token's heads side by side. Token t goes to slot slots[t] = block * block_size +
// token in block of the caches, whose strides are in 16 bytes. A negative slot, or t >= cached, is written nowhere.
struct RotateArgs {
  __half *q;                          // [tokens, q_heads, head_dim], rotated in place
  const __half *key, *value;          // [tokens, kv_heads, head_dim]
  const __half *q_weight, *k_weight;  // [head_dim]: weights of a norm of each head before the rotation; null: none
  const int64_t *positions;           // [tokens]
  const __half *cos_sin;              // [any, rotated]: cos of a position's rotated / 2 angles, then sin
  __half *k_cache, *v_cache;
  const int64_t *slots;  // [cached]
  int tokens, cached, q_heads, kv_heads, head_dim, rotated;
  int q_stride, key_stride, value_stride;
  int block_size, block_chunks, token_chunks, head_chunks;
  float eps;
  int halves;  // 1: an angle rotates dimensions rotated / 2 apart (GPT-NeoX); 0: neighbours (GPT-J)
};

}  // namespace voltserve
