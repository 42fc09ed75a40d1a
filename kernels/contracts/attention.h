// The contract of the attention ops, torch.ops.voltserve.*, for requests whose keys and values lie in blocks ("paged"), as vLLM has them:
//
//   paged_attention(q, k_cache, v_cache, block_table, query_start, seq_lens, decode_query_len, max_query_len, scale, window,
//                   soft_cap, out!) -> ()
//       q, out       float16 [T, H, D], H query heads of D = 64, 80, 96, 128 or 256; the last two dimensions together
//       k/v_cache    float16 [blocks, B, H_kv, D], B a multiple of 8; any strides that are multiples of 8 elements, D's 1; alike
//       block_table  int32 [R, any]: position p of request r is token p % B of block block_table[r][p / B]
//       query_start  int32 [R + 1]: request r's new tokens are rows query_start[r] .. query_start[r + 1] - 1 of q
//       seq_lens     int32 [R]: positions of a request, of which its new tokens are the last; they are in the cache already
//       decode_query_len, max_query_len   the most new tokens of a request that has at most 8, and of any; upper bounds are allowed
//       scale        of q k; window: the last `window` positions are seen, the token itself included, 0 all; soft_cap c:
//                    scores become c tanh(score / c), 0 none
//       out[t][h] = softmax over the positions up to t's own (and in the window) of scale q[t][h] k, times v. Sums are float32. Rows of q
//       that belong to no request are left as they are. What no request sees is not read, or has no influence even if it is NaN.
//
//   reshape_and_cache(key, value, k_cache!, v_cache!, slots) -> ()
//       key, value   float16 [T, H_kv, D], the last two dimensions together; slots int64 [at most T]: block * B + token in block, or
//                    negative: nowhere
//
//   rotate_and_cache(q!, key, value, positions, cos_sin, halves, q_weight, k_weight, eps, k_cache!, v_cache!, slots) -> ()
//       reshape_and_cache after a rotation of q [T, H, D], in place, and of key, after an RMS norm of each of their heads where q_weight and
//       k_weight, float16 [D], are given. D at most 256; no tensor may overlap another's part.
//       positions    int64 [T]
//       cos_sin      float16 [any, R], R a multiple of 4, at most D: cos of the R / 2 angles of a position, then sin. Dimensions i and
//                    i + R / 2 are turned by angle i (halves), or 2 i and 2 i + 1; those from R on are not
//
// On the GPU only.
#pragma once
