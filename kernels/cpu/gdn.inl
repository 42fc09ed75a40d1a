// The two ops of a Gated DeltaNet layer (contracts/gdn.h) in float32, for any vector type. Needs what layers.inl needs.
//
// A state of 128 x 128 has 64 KB. Each token reads and writes it once per head, from the second-level cache while a request's tokens
// pass. That bounds both decoding and prefill. Tokens of a request are processed in order. The chunked form of the rule trades
// this for GEMMs, which a CPU computes no faster.
#include <cmath>

#include "contracts/gdn.h"

namespace voltserve::cpu {
namespace {

struct Tokens {
  int64_t begin, end;
};

Tokens tokens_of(const Requests &requests, int64_t r) {
  return requests.starts ? Tokens{requests.starts[r], requests.starts[r + 1]} : Tokens{r, r + 1};
}

int64_t slot_of(const Requests &requests, int64_t r) { return requests.slots[r * requests.slot_stride]; }

bool is_continued(const Requests &requests, int64_t r) { return !requests.continued || requests.continued[r]; }

// One vector of channels, from c on, of one request in its slot.
void conv_channels(const Conv1d<float> &conv, Tokens tokens, float *state, bool continued, int64_t c) {
  F taps[kConvTaps], past[kConvTaps];
  for (int j = 0; j < kConvTaps; ++j) {
    float column[Vector::width];
    for (int i = 0; i < Vector::width; ++i) column[i] = conv.weight[(c + i) * kConvTaps + j];
    taps[j] = Vector::load(column);
  }
  for (int j = 0; j < kConvTaps - 1; ++j) {
    past[j] = continued ? Vector::load(state + j * conv.channels + c) : Vector::zero();
  }
  const F one = Vector::set(1.0f);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    past[kConvTaps - 1] = Vector::load(conv.x + t * conv.x_stride + c);
    F sum = Vector::mul(taps[0], past[0]);
    for (int j = 1; j < kConvTaps; ++j) sum = Vector::fma(taps[j], past[j], sum);
    const F silu = Vector::div(sum, Vector::add(one, Vector::exp(Vector::sub(Vector::zero(), sum))));
    Vector::store(conv.y + t * conv.channels + c, silu);
    for (int j = 0; j + 1 < kConvTaps; ++j) past[j] = past[j + 1];
  }
  for (int j = 0; j < kConvTaps - 1; ++j) Vector::store(state + j * conv.channels + c, past[j]);
}

// Channels channel_begin..channel_end, both multiples of kGdnWidth, of all requests.
void causal_conv1d(const Conv1d<float> &conv, const Requests &requests, int64_t channel_begin, int64_t channel_end) {
  for (int64_t r = 0; r < requests.count; ++r) {
    const Tokens tokens = tokens_of(requests, r);
    const int64_t slot = slot_of(requests, r);
    if (slot < 0) {
      for (int64_t t = tokens.begin; t < tokens.end; ++t) {
        std::fill(conv.y + t * conv.channels + channel_begin, conv.y + t * conv.channels + channel_end, 0.0f);
      }
      continue;
    }
    if (tokens.begin == tokens.end) continue;
    float *state = conv.state + slot * conv.state_stride;
    for (int64_t c = channel_begin; c < channel_end; c += Vector::width) {
      conv_channels(conv, tokens, state, is_continued(requests, r), c);
    }
  }
}

// to [n] = from / sqrt(sum from² + 1e-6) * factor.
void l2_normalize(const float *from, float factor, float *to, int n) {
  F squares = Vector::zero();
  for (int i = 0; i < n; i += Vector::width) {
    const F value = Vector::load(from + i);
    squares = Vector::fma(value, value, squares);
  }
  const F scale = Vector::set(factor / std::sqrt(Vector::sum(squares) + 1e-6f));
  for (int i = 0; i < n; i += Vector::width) Vector::store(to + i, Vector::mul(Vector::load(from + i), scale));
}

// One token of one head: updates row v of the state S [dim, dim], and computes out[v] from it.
void delta_step(float *state, const float *q, const float *k, const float *v, float decay, float beta, float *out, int dim) {
  const F kept = Vector::set(decay);
  for (int row = 0; row < dim; ++row, state += dim) {
    F recalled = Vector::zero(), sum = Vector::zero();
    for (int i = 0; i < dim; i += Vector::width) recalled = Vector::fma(Vector::load(state + i), Vector::load(k + i), recalled);
    const F change = Vector::set(beta * (v[row] - decay * Vector::sum(recalled)));
    for (int i = 0; i < dim; i += Vector::width) {
      const F now = Vector::fma(change, Vector::load(k + i), Vector::mul(kept, Vector::load(state + i)));
      Vector::store(state + i, now);
      sum = Vector::fma(now, Vector::load(q + i), sum);
    }
    out[row] = Vector::sum(sum);
  }
}

// Pairs of a request and a value head: number r * value_heads + h, from pair_begin to pair_end.
void gated_delta_rule(const DeltaRule<float> &rule, const Requests &requests, int64_t pair_begin, int64_t pair_end) {
  const int dim = rule.dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t pair = pair_begin; pair < pair_end; ++pair) {
    const int64_t r = pair / rule.value_heads;
    const int head = static_cast<int>(pair % rule.value_heads), key_head = head * rule.key_heads / rule.value_heads;
    const Tokens tokens = tokens_of(requests, r);
    float *out = rule.out + (tokens.begin * rule.value_heads + head) * dim;
    const int64_t out_stride = static_cast<int64_t>(rule.value_heads) * dim;
    const int64_t slot = slot_of(requests, r);
    if (slot < 0) {
      for (int64_t t = tokens.begin; t < tokens.end; ++t, out += out_stride) std::fill_n(out, dim, 0.0f);
      continue;
    }
    if (tokens.begin == tokens.end) continue;
    float *state = rule.state + slot * rule.state_stride + static_cast<int64_t>(head) * dim * dim;
    if (!is_continued(requests, r)) std::fill_n(state, dim * dim, 0.0f);
    for (int64_t t = tokens.begin; t < tokens.end; ++t, out += out_stride) {
      const float *q = rule.qkv + t * rule.qkv_stride + key_head * dim;
      const float *k = q + rule.key_heads * dim;
      const float *v = rule.qkv + t * rule.qkv_stride + (2 * rule.key_heads + head) * dim;
      float query[kMaxGdnDim], key[kMaxGdnDim];
      l2_normalize(q, scale, query, dim);
      l2_normalize(k, 1.0f, key, dim);
      const float x = rule.a[t * rule.a_stride + head] + rule.dt_bias[head];
      const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
      const float decay = std::exp(-std::exp(rule.a_log[head]) * softplus);
      const float beta = 1.0f / (1.0f + std::exp(-rule.b[t * rule.b_stride + head]));
      delta_step(state, query, key, v, decay, beta, out, dim);
    }
  }
}

}  // namespace
}  // namespace voltserve::cpu
