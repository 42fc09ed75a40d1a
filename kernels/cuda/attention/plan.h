// How an attention call is cut into blocks: a pure function of the batch's shape and the GPU. It does not depend on the lengths in the
// cache, which only the GPU knows, so a captured CUDA graph stays right when they grow. Plain C++ without CUDA.
#pragma once

#include <cstddef>

#include "cuda/common/layout.cuh"

namespace voltserve {

// Requests of at most this many new tokens are computed by decode.cuh, longer ones by prefill.cuh.
constexpr int kDecodeTokens = 8;
// The most splits of one request. They are added up in groups of 16, in at most three levels.
constexpr int kMaxSplits = 1024, kAddingLevels = 3;

struct AttentionProblem {
  int requests, tokens;
  int decode_query_len;  // most new tokens of any request with at most kDecodeTokens; 0: no such request
  int max_query_len;     // most new tokens of any request
  int q_heads, kv_heads, head_dim;
  int processors;
};

// The template arguments of decode.cuh.
struct DecodeShape {
  int head_dim;
  int row_warps;             // warps with different rows, 8 each
  int token_warps;           // warps with the same rows and different positions
  int blocks_per_processor;  // that fit a V100 by registers, with some 64 KB of keys and values in flight

  VOLTSERVE_BOTH constexpr int rows() const { return 8 * row_warps; }
  VOLTSERVE_BOTH constexpr int threads() const { return 32 * row_warps * token_warps; }
  VOLTSERVE_BOTH constexpr int tile() const { return 16 * token_warps; }  // positions per block and step
};

VOLTSERVE_BOTH constexpr DecodeShape decode_shape(int head_dim, int row_warps) {
  const int blocks = head_dim > 128 || (head_dim == 128 && row_warps == 1) ? 2 : head_dim > 64 ? 3 : 4;
  return {head_dim, row_warps, row_warps >= 4 ? 1 : 4 / row_warps, blocks / (row_warps == 8 ? 2 : 1)};
}

// The template arguments of prefill.cuh.
struct PrefillShape {
  int head_dim;
  int warps;   // of 16 rows each
  int tokens;  // positions per tile
  int blocks_per_processor;

  VOLTSERVE_BOTH constexpr int rows() const { return 16 * warps; }
  VOLTSERVE_BOTH constexpr int groups() const { return (head_dim + 63) / 64; }
  VOLTSERVE_BOTH constexpr int stride() const {
    return 64 * groups() + 8;
  }  // of Q, K and V in shared memory, padded by 8 against bank conflicts
  VOLTSERVE_BOTH constexpr int shared_bytes() const { return 2 * ((rows() + tokens) * stride() + rows() * (tokens + 8)); }
};

VOLTSERVE_BOTH constexpr PrefillShape prefill_shape(int head_dim) {
  return head_dim > 128 ? PrefillShape{head_dim, 8, 32, 1} : PrefillShape{head_dim, 4, 64, head_dim > 64 ? 2 : 3};
}

struct AttentionPlan {
  DecodeShape decode;
  int splits;        // the most splits of a decoding step; 0: nothing decodes
  int row_blocks;    // blocks per split where its rows are too many for one
  int partial_rows;  // rows of partial results per split and key head
  size_t partial_floats, arrival_words;
  PrefillShape prefill;
  int prefill_tiles;  // the most tiles of rows per key head; 0: no request is long enough
  int prefill_shared_bytes;
  const char *reason;
};

// Throws std::invalid_argument naming what does not fit.
AttentionPlan plan_attention(const AttentionProblem &problem);

}  // namespace voltserve
