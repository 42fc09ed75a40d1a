#include "cuda/attention/plan.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace voltserve {
namespace {

void expect(bool fits, const char *name, const std::string &expected, int got) {
  if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
}

// The fewest rows that hold `rows`, up to a block's most.
DecodeShape shape_for(int head_dim, int rows) {
  for (const int warps : {1, 2, 4}) {
    if (rows <= 8 * warps) return decode_shape(head_dim, warps);
  }
  return decode_shape(head_dim, 8);
}

}  // namespace

AttentionPlan plan_attention(const AttentionProblem &p) {
  expect(p.requests > 0, "requests", "at least 1", p.requests);
  expect(p.tokens > 0, "tokens", "at least 1", p.tokens);
  expect(p.kv_heads > 0, "kv_heads", "at least 1", p.kv_heads);
  expect(p.q_heads > 0 && p.q_heads % p.kv_heads == 0, "q_heads", "a multiple of kv_heads", p.q_heads);
  constexpr int kHeadDims[] = {64, 80, 96, 128, 256};
  expect(std::count(std::begin(kHeadDims), std::end(kHeadDims), p.head_dim) > 0, "head_dim", "64, 80, 96, 128 or 256", p.head_dim);
  expect(p.decode_query_len >= 0 && p.decode_query_len <= kDecodeTokens, "decode_query_len",
         "0 to " + std::to_string(kDecodeTokens), p.decode_query_len);
  expect(p.max_query_len > 0 && (p.max_query_len > kDecodeTokens || p.max_query_len == p.decode_query_len), "max_query_len",
         "decode_query_len, or more than " + std::to_string(kDecodeTokens), p.max_query_len);
  expect(p.processors > 0, "processors", "at least 1", p.processors);

  AttentionPlan plan{};
  const int group = p.q_heads / p.kv_heads;
  if (p.decode_query_len > 0) {
    const int rows = p.decode_query_len * group;
    plan.decode = shape_for(p.head_dim, rows);
    plan.row_blocks = ceil_div(rows, plan.decode.rows());
    const int places = p.processors * plan.decode.blocks_per_processor;
    const int splits = std::clamp(places / (p.kv_heads * plan.row_blocks), 1, kMaxSplits);
    // Every request has at least one split. Where requests are many, some can still be cut.
    plan.splits = p.requests <= splits / 2 ? splits : p.requests + splits / 2;
    plan.partial_rows = rows;
    plan.partial_floats = static_cast<size_t>(plan.splits) * p.kv_heads * rows * (p.head_dim + 2);
    plan.arrival_words = static_cast<size_t>(kAddingLevels) * plan.splits * p.kv_heads * plan.row_blocks;
  }
  if (p.max_query_len > kDecodeTokens) {
    plan.prefill = prefill_shape(p.head_dim);
    plan.prefill_shared_bytes = plan.prefill.shared_bytes();
    // Each request's last tile may be short.
    plan.prefill_tiles = p.tokens * group / plan.prefill.rows() + std::min(p.requests, p.tokens / (kDecodeTokens + 1));
  }
  plan.reason = plan.splits == 0 ? "long queries only: bound by their GEMMs, in tiles of queries"
                : plan.prefill_tiles == 0
                    ? "short queries only: bound by reading the cache, in equal splits"
                    : "long queries in tiles, bound by their GEMMs; short ones in splits, bound by reading the cache";
  return plan;
}

}  // namespace voltserve
