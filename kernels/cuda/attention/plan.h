// How a call of attention is cut into blocks, a pure function of the batch's shape and the GPU: not of the lengths in the cache, which
// only the GPU knows, so that a captured CUDA graph stays right when they grow. Plain C++ without CUDA.
#pragma once

#include <cstddef>

#include "cuda/common/layout.cuh"

namespace voltserve {

// Requests with more new tokens than this are computed on tensor cores (prefill.cuh), others as decode.cuh does.
constexpr int kDecodeTokens = 8;
// More runs than this of one request's cache are not cut: they are added up by 16, three times at most.
constexpr int kMaxRuns = 1024, kAddingLevels = 3;

struct AttentionProblem {
  int requests, tokens;
  int decode_query_len;  // most new tokens of a request that has at most kDecodeTokens of them; 0: there is none
  int max_query_len;     // of any request
  int q_heads, kv_heads, head_dim;
  int processors;
};

// decode.cuh's template arguments.
struct DecodeShape {
  int head_dim;
  int row_warps;    // warps with different rows, 8 each: pairs of new token and query head
  int token_warps;  // warps with the same rows and different cached tokens
  int blocks_per_processor;  // that fit a V100, by registers, and have 64 KB or so of keys and values under way, but for many rows

  VOLTSERVE_BOTH constexpr int rows() const { return 8 * row_warps; }
  VOLTSERVE_BOTH constexpr int threads() const { return 32 * row_warps * token_warps; }
  VOLTSERVE_BOTH constexpr int tile() const { return 16 * token_warps; }  // cached tokens of a block at once
};

VOLTSERVE_BOTH constexpr DecodeShape decode_shape(int head_dim, int row_warps) {
  const int blocks = head_dim > 128 || (head_dim == 128 && row_warps == 1) ? 2 : head_dim > 64 ? 3 : 4;
  return {head_dim, row_warps, row_warps >= 4 ? 1 : 4 / row_warps, blocks / (row_warps == 8 ? 2 : 1)};
}

// prefill.cuh's template arguments.
struct PrefillShape {
  int head_dim;
  int warps;   // of 16 rows, pairs of new token and query head, each
  int tokens;  // cached ones at once
  int blocks_per_processor;

  VOLTSERVE_BOTH constexpr int rows() const { return 16 * warps; }
  VOLTSERVE_BOTH constexpr int groups() const { return (head_dim + 63) / 64; }
  VOLTSERVE_BOTH constexpr int stride() const { return 64 * groups() + 8; }  // of Q, K and V in shared memory: 8 more, against bank conflicts
  VOLTSERVE_BOTH constexpr int shared_bytes() const { return 2 * ((rows() + tokens) * stride() + rows() * (tokens + 8)); }
};

VOLTSERVE_BOTH constexpr PrefillShape prefill_shape(int head_dim) {
  return head_dim > 128 ? PrefillShape{head_dim, 8, 32, 1} : PrefillShape{head_dim, 4, 64, head_dim > 64 ? 2 : 3};
}

struct AttentionPlan {
  DecodeShape decode;
  int units;          // runs of cached tokens that a decoding step is cut into, at most; 0: nothing decodes
  int row_blocks;     // blocks that share a run because its rows are too many for one
  int partial_rows;   // rows that partial results are kept for, a run and key head
  size_t partial_floats, arrival_words;
  PrefillShape prefill;
  int prefill_tiles;  // of rows, a key head, at most; 0: nothing is long enough
  int prefill_shared_bytes;
  const char *reason;
};

// Throws std::invalid_argument naming what does not fit.
AttentionPlan plan_attention(const AttentionProblem &problem);

}  // namespace voltserve
