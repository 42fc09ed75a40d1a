// How attention over a paged cache is shared among threads, and how the parts of a token's positions meet.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>

#include "cpu/pool.h"

namespace voltserve::cpu {

void write_to_cache(const PagedCache &cache, int64_t slot, const float *key, const float *value, int64_t kv_heads, int64_t dim) {
  if (slot < 0) return;
  const int64_t at = slot / cache.page_size * cache.page_stride, offset = slot % cache.page_size, head = cache.page_size * dim;
  for (int64_t h = 0; h < kv_heads; ++h) {
    float *keys = cache.keys + at + h * head + offset;
    for (int64_t d = 0; d < dim; ++d) keys[d * cache.page_size] = key[h * dim + d];
    std::copy_n(value + h * dim, dim, cache.values + at + h * head + offset * dim);
  }
}

PagedAttention::PagedAttention(const AttentionShape &shape, const PagedRequests &requests) : shape_(shape), requests_(requests) {
  for (int64_t r = 0; r < requests.count; ++r) {
    const int64_t first = requests.query_start[r], stop = requests.query_start[r + 1];
    for (int64_t token = first; token < stop; ++token) {
      const int64_t length = requests.seq_lens[r] - (stop - 1 - token);
      const int64_t seen = shape.window > 0 ? std::max<int64_t>(0, length - shape.window) : 0;
      const int64_t from = seen / kPageUnit * kPageUnit;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        for (int64_t begin = from; begin < length; begin += kSpan) {
          const int64_t end = std::min(length, begin + kSpan);
          pieces_.push_back({token, r, head, begin, end, begin == from ? seen - from : 0});
          positions_ += end - begin;
        }
      }
    }
  }
  const int64_t group = shape.heads / shape.kv_heads, pieces = static_cast<int64_t>(pieces_.size());
  partials_.resize(pieces * group);
  partial_out_.reset(new float[pieces * group * shape.dim]);
}

void PagedAttention::run(const PagedCache &cache, const float *q, int64_t q_stride, float *out, int64_t out_stride) {
  const int64_t dim = shape_.dim, group = shape_.heads / shape_.kv_heads, head_size = cache.page_size * dim;
  const int64_t pieces = static_cast<int64_t>(pieces_.size());
  if (pieces == 0) return;
  parallel_for(pieces, grain(2 * group * dim * positions_ / pieces), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece &piece = pieces_[i];
      const PagedHead head = {cache.keys + piece.kv_head * head_size,
                              cache.values + piece.kv_head * head_size,
                              requests_.block_table + piece.request * requests_.pages_each,
                              cache.page_stride,
                              cache.page_size,
                              dim};
      const Span span = {piece.begin, piece.end, piece.hidden};
      chosen()->attend(head, q + piece.token * q_stride + piece.kv_head * group * dim, group, shape_.scale, shape_.soft_cap, span,
                       partials_.data() + i * group, partial_out_.get() + i * group * dim);
    }
  });
  // Spans of one token and head are consecutive.
  for (int64_t i = 0; i < pieces;) {
    const Piece &piece = pieces_[i];
    int64_t stop = i + 1;
    while (stop < pieces && pieces_[stop].token == piece.token && pieces_[stop].kv_head == piece.kv_head) ++stop;
    for (int64_t h = 0; h < group; ++h) {
      float highest = partials_[i * group + h].highest, sum = 0;
      for (int64_t p = i; p < stop; ++p) highest = std::max(highest, partials_[p * group + h].highest);
      float *to = out + piece.token * out_stride + (piece.kv_head * group + h) * dim;
      std::fill_n(to, dim, 0.0f);
      for (int64_t p = i; p < stop; ++p) {
        const PartialAttention &partial = partials_[p * group + h];
        const float weight = std::exp(partial.highest - highest);
        sum += weight * partial.sum;
        const float *from = partial_out_.get() + (p * group + h) * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] += weight * from[d];
      }
      for (int64_t d = 0; d < dim; ++d) to[d] /= sum;
    }
    i = stop;
  }
}

}  // namespace voltserve::cpu
