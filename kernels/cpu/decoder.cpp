// The order of operations in a step of all decoder layers, and how each is shared among threads.
#include "cpu/decoder.h"

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/pool.h"

namespace voltserve::cpu {
namespace {

void product(const Nvfp4Matrix &w, const float *x, int64_t m, const float *bias, float *y) {
  parallel_for(tiles_of(w.rows), grain(kTileRows * w.columns * m),
               [&](int64_t begin, int64_t end) { chosen()->linear(w, x, m, bias, y, begin, end); });
}

// For elementwise work on rows of n numbers, with few operations each.
template <class Function>
void over_rows(int64_t rows, int64_t n, const Function &function) {
  constexpr int64_t kNumbersPerThread = 4096;
  parallel_for(rows, kNumbersPerThread / n + 1, function);
}

}  // namespace

struct Decoder::Buffers {
  float *normed, *qkv, *attended, *gate_up, *activated;
};

void Decoder::attention(const DecoderLayer &layer, const StepBatch &batch, const PagedCache &cache, PagedAttention &attention,
                        Buffers &buffers) {
  const auto [hidden, heads, kv_heads, dim, intermediate, eps, scale] = shape;
  const int64_t qkv = shape.qkv();
  over_rows(batch.tokens, qkv, [&, heads = heads, kv_heads = kv_heads, dim = dim, eps = eps](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float *q = buffers.qkv + t * qkv, *k = q + heads * dim, *v = k + kv_heads * dim;
      const float *cos_sin = batch.cos_sin + batch.positions[t] * dim;
      chosen()->norm_and_rotate(q, heads, dim, layer.query_norm, eps, cos_sin);
      chosen()->norm_and_rotate(k, kv_heads, dim, layer.key_norm, eps, cos_sin);
      write_to_cache(cache, batch.slots[t], k, v, kv_heads, dim);
    }
  });
  attention.run(cache, buffers.qkv, qkv, buffers.attended, heads * dim);
}

void Decoder::step(const StepBatch &batch, const std::vector<PagedCache> &caches, float *x, float *y) {
  std::lock_guard lock(busy_);
  const auto [hidden, heads, kv_heads, dim, intermediate, eps, scale] = shape;
  const int64_t m = batch.tokens;
  Buffers buffers;
  PagedAttention paged({heads, kv_heads, dim, scale, 0, 0}, batch.requests);
  const int64_t sizes[] = {m * hidden, m * shape.qkv(), m * heads * dim, m * 2 * intermediate, m * intermediate};
  float **const parts[] = {&buffers.normed, &buffers.qkv, &buffers.attended, &buffers.gate_up, &buffers.activated};
  int64_t needed = 0;
  for (const int64_t size : sizes) needed += size;
  if (static_cast<int64_t>(room_.size()) < needed) room_.resize(needed);
  float *next = room_.data();
  for (int i = 0; i < 5; ++i) {
    *parts[i] = next;
    next += sizes[i];
  }

  // x is the residual stream. `added` is the output of the layer before, not yet added to it.
  float *added = nullptr;
  const auto norm = [&, hidden = hidden, eps = eps](const float *weight, float *to) {
    over_rows(m, hidden, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * hidden;
      if (added) {
        chosen()->rms_norm(added + at, x + at, weight, eps, to + at, end - begin, hidden);
      } else {
        chosen()->rms_norm(x + at, nullptr, weight, eps, to + at, end - begin, hidden);
      }
    });
    added = y;
  };
  for (size_t l = 0; l < layers.size(); ++l) {
    const DecoderLayer &layer = layers[l];
    norm(layer.input_norm, buffers.normed);
    product(layer.qkv, buffers.normed, m, layer.qkv_bias, buffers.qkv);
    attention(layer, batch, caches[l], paged, buffers);
    product(layer.out, buffers.attended, m, nullptr, y);
    norm(layer.post_norm, buffers.normed);
    product(layer.gate_up, buffers.normed, m, nullptr, buffers.gate_up);
    over_rows(m, intermediate, [&, n = intermediate](int64_t begin, int64_t end) {
      chosen()->silu_and_mul(buffers.gate_up + begin * 2 * n, buffers.activated + begin * n, end - begin, n);
    });
    product(layer.down, buffers.activated, m, nullptr, y);
  }
  norm(final_norm_, y);
}

}  // namespace voltserve::cpu
