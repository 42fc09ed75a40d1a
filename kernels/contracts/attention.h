// The contract of the attention ops, torch.ops.voltserve.*, on a paged cache. Keys and values lie in blocks, as vLLM keeps them.
// rotate_and_cache exists on GPUs only. On the CPU the other two take float32 instead of float16, and these shapes:
//       k_cache      [blocks, H_kv, D, B], so that a vector holds several positions; B a multiple of kPageUnit
//       v_cache      [blocks, H_kv, B, D]; both are dense within a block, with any stride between blocks
//       q, out       D is a multiple of kHeadUnit up to kMaxHeadDim
//   There the cost of a new token is that of a pass over its request's cache, so long prompts are computed elsewhere.
//
//   paged_attention(q, k_cache, v_cache, block_table, query_start, seq_lens, decode_query_len, max_query_len, scale, window,
//                   soft_cap, out!) -> ()
//       out[t][h] = softmax(scale * q[t][h] K^T) V over the positions up to t's own that lie in the window. Sums are float32.
//       q, out       float16 [T, H, D], H query heads of D = 64, 80, 96, 128 or 256; the last two dimensions contiguous
//       k/v_cache    float16 [blocks, B, H_kv, D], B a multiple of 8; equal strides, each a multiple of 8 elements, D's 1
//       block_table  int32 [R, any]: position p of request r is token p % B of block block_table[r][p / B]
//       query_start  int32 [R + 1]: request r's new tokens are rows query_start[r] .. query_start[r + 1] - 1 of q
//       seq_lens     int32 [R]: positions of each request. Its new tokens are the last ones, and already in the cache.
//       decode_query_len   the most new tokens of any request that has at most 8, or an upper bound of it
//       max_query_len      the most new tokens of any request, or an upper bound of it
//       window       a token sees the last `window` positions, itself included; 0: all
//       soft_cap     c: scores become c tanh(score / c); 0: unchanged
//       Rows of q that belong to no request are left as they are. Positions that no token sees have no influence, even if they are NaN.
//
//   reshape_and_cache(key, value, k_cache!, v_cache!, slots) -> ()
//       key, value   float16 [T, H_kv, D], the last two dimensions contiguous
//       slots        int64 [at most T]: block * B + token in block; a negative slot is written nowhere
//
//   rotate_and_cache(q!, key, value, positions, cos_sin, halves, q_weight, k_weight, eps, k_cache!, v_cache!, slots) -> ()
//       Rotates q [T, H, D], in place, and key; then does what reshape_and_cache does. Where q_weight and k_weight, float16 [D], are
//       given, an RMS norm of each head comes first. D is at most 256; no tensor may overlap another.
//       positions    int64 [T]
//       cos_sin      float16 [any, R], R a multiple of 4, at most D: per position the cosines of R / 2 angles, then the sines. Angle i
//                    rotates dimensions i and i + R / 2 (halves), or 2 i and 2 i + 1. Dimensions from R on are unchanged.
#pragma once

namespace voltserve {

// Units of the CPU's kernels.
constexpr int kHeadUnit = 32;
constexpr int kMaxHeadDim = 256;
constexpr int kPageUnit = 16;

}  // namespace voltserve
