// Attention and rotation of a decoding step (contracts/decoder.h) in float32, for any vector type. Needs what layers.inl needs.
//
// A page of keys is stored with positions contiguous, so a vector holds the scores of several positions and nothing is summed across
// lanes. Values are stored by position, so a vector holds several dimensions of the output. One call computes one token, the query
// heads of one key/value head, and at most kSpan positions. That is small enough to share among threads, and its scores stay in the
// first-level cache.
#include <cmath>
#include <limits>

#include "contracts/decoder.h"

namespace voltserve::cpu {
namespace {

// scores[p] = scale * q . key p, for at most kSpan positions from `begin` on, in whole vectors. Scores past `end` in the last vector
// are undefined.
void scores_of(const PagedHead &head, const float *q, float scale, int64_t begin, int64_t end, float *scores) {
  constexpr int kVectors = kPageUnit / Vector::width;
  for (int64_t position = begin; position < end; position += kPageUnit) {
    const int64_t offset = position % head.page_size;
    const float *keys = head.keys + head.pages[position / head.page_size] * head.page_stride + offset;
    F sum[2][kVectors];  // two chains, to hide the latency of multiply-adds
    for (auto &chain : sum) std::fill_n(chain, kVectors, Vector::zero());
    for (int64_t d = 0; d < head.dim; d += 2) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const F key = Vector::load(keys + (d + odd) * head.page_size + v * Vector::width);
          sum[odd][v] = Vector::fma(key, Vector::broadcast(q[d + odd]), sum[odd][v]);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const F total = Vector::mul(Vector::add(sum[0][v], sum[1][v]), Vector::set(scale));
      Vector::store(scores + position - begin + v * Vector::width, total);
    }
  }
}

// Dimensions d .. d + kHeadUnit of the sum over p of weights[p] * value p.
void values_of(const PagedHead &head, const float *weights, int64_t begin, int64_t end, int64_t d, float *out) {
  constexpr int kVectors = kHeadUnit / Vector::width;
  F sum[kVectors];
  std::fill_n(sum, kVectors, Vector::zero());
  for (int64_t position = begin; position < end; ++position) {
    const int64_t offset = position % head.page_size;
    const float *value = head.values + head.pages[position / head.page_size] * head.page_stride + offset * head.dim + d;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[v] = Vector::fma(Vector::load(value + v * Vector::width), Vector::broadcast(weights[position - begin]), sum[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) Vector::store(out + v * Vector::width, sum[v]);
}

void attend(const PagedHead &head, const float *q, int64_t q_heads, float scale, float soft_cap, const Span &span,
            PartialAttention *partial, float *out) {
  const auto [begin, end, hidden] = span;
  float weights[kSpan];
  const int64_t count = end - begin;
  for (int64_t h = 0; h < q_heads; ++h, q += head.dim, out += head.dim) {
    scores_of(head, q, scale, begin, end, weights);
    if (soft_cap != 0) {
      for (int64_t i = 0; i < count; ++i) weights[i] = soft_cap * std::tanh(weights[i] / soft_cap);
    }
    const float highest = *std::max_element(weights + hidden, weights + count);
    std::fill_n(weights, hidden, highest);
    std::fill(weights + count, weights + (count + kPageUnit - 1) / kPageUnit * kPageUnit, highest);
    for (int64_t i = 0; i < count; i += Vector::width) {
      Vector::store(weights + i, Vector::exp(Vector::sub(Vector::load(weights + i), Vector::set(highest))));
    }
    std::fill_n(weights, hidden, 0.0f);
    float sum = 0;
    for (int64_t i = hidden; i < count; ++i) sum += weights[i];
    for (int64_t d = 0; d < head.dim; d += kHeadUnit) values_of(head, weights + hidden, begin + hidden, end, d, out + d);
    partial[h] = {highest, sum};
  }
}

// Norms each of `heads` heads at x, where `norm` is given, and then rotates it.
void norm_and_rotate(float *x, int64_t heads, int64_t dim, const float *norm, float eps, const float *cos_sin) {
  if (norm) rms_norm(x, nullptr, norm, eps, x, heads, dim);
  const int64_t half = dim / 2;
  for (int64_t h = 0; h < heads; ++h, x += dim) {
    for (int64_t i = 0; i < half; i += Vector::width) {
      const F cos = Vector::load(cos_sin + i), sin = Vector::load(cos_sin + half + i);
      const F a = Vector::load(x + i), b = Vector::load(x + half + i);
      Vector::store(x + i, Vector::sub(Vector::mul(a, cos), Vector::mul(b, sin)));
      Vector::store(x + half + i, Vector::add(Vector::mul(b, cos), Vector::mul(a, sin)));
    }
  }
}

}  // namespace
}  // namespace voltserve::cpu
