// The order of operations in a step of all decoder layers, and how each is shared among threads.
#include "cpu/decoder.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/pool.h"

namespace voltserve::cpu {
namespace {

// The query heads of one key/value head, for one token and one span of positions.
struct Piece {
  int64_t token, request, kv_head, begin, end;
};

std::vector<Piece> pieces_of(const StepBatch &batch, int64_t kv_heads) {
  std::vector<Piece> pieces;
  for (int64_t r = 0; r < batch.requests; ++r) {
    const int64_t first = batch.query_start[r], stop = batch.query_start[r + 1];
    for (int64_t token = first; token < stop; ++token) {
      const int64_t length = batch.seq_lens[r] - (stop - 1 - token);
      for (int64_t head = 0; head < kv_heads; ++head) {
        for (int64_t begin = 0; begin < length; begin += kSpan) {
          pieces.push_back({token, r, head, begin, std::min(length, begin + kSpan)});
        }
      }
    }
  }
  return pieces;
}

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
  std::vector<Piece> pieces;
  std::vector<PartialAttention> partials;  // [pieces, q heads of a kv head]
  float *normed, *qkv, *partial_out, *attended, *gate_up, *activated;
};

void Decoder::attention(const DecoderLayer &layer, const StepBatch &batch, const PagedCache &cache, Buffers &buffers) {
  const auto [hidden, heads, kv_heads, dim, intermediate, eps, scale] = shape;
  const int64_t group = heads / kv_heads, page = cache.page_size * dim, qkv = shape.qkv();
  over_rows(batch.tokens, qkv, [&, heads = heads, kv_heads = kv_heads, dim = dim, eps = eps](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float *q = buffers.qkv + t * qkv, *k = q + heads * dim, *v = k + kv_heads * dim;
      const float *cos_sin = batch.cos_sin + batch.positions[t] * dim;
      chosen()->norm_and_rotate(q, heads, dim, layer.query_norm, eps, cos_sin);
      chosen()->norm_and_rotate(k, kv_heads, dim, layer.key_norm, eps, cos_sin);
      if (batch.slots[t] < 0) continue;
      const int64_t at = batch.slots[t] / cache.page_size * kv_heads * page, offset = batch.slots[t] % cache.page_size;
      for (int64_t h = 0; h < kv_heads; ++h) {
        float *keys = cache.keys + at + h * page + offset;
        for (int64_t d = 0; d < dim; ++d) keys[d * cache.page_size] = k[h * dim + d];
        std::copy_n(v + h * dim, dim, cache.values + at + h * page + offset * dim);
      }
    }
  });
  const int64_t pieces = static_cast<int64_t>(buffers.pieces.size());
  int64_t positions = 0;
  for (const Piece &piece : buffers.pieces) positions += piece.end - piece.begin;
  parallel_for(pieces, grain(2 * group * dim * positions / pieces),
               [&, kv_heads = kv_heads, dim = dim, scale = scale](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece &piece = buffers.pieces[i];
      const PagedHead head = {cache.keys + piece.kv_head * page,
                              cache.values + piece.kv_head * page,
                              batch.block_table + piece.request * batch.pages_per_request,
                              kv_heads * page,
                              cache.page_size,
                              dim};
      chosen()->attend(head, buffers.qkv + piece.token * qkv + piece.kv_head * group * dim, group, scale, piece.begin, piece.end,
                       buffers.partials.data() + i * group, buffers.partial_out + i * group * dim);
    }
  });
  // Spans of one token and head are consecutive.
  for (int64_t i = 0; i < pieces;) {
    const Piece &piece = buffers.pieces[i];
    int64_t stop = i + 1;
    while (stop < pieces && buffers.pieces[stop].begin > 0) ++stop;
    for (int64_t h = 0; h < group; ++h) {
      float highest = buffers.partials[i * group + h].highest, sum = 0;
      for (int64_t p = i; p < stop; ++p) highest = std::max(highest, buffers.partials[p * group + h].highest);
      float *out = buffers.attended + (piece.token * heads + piece.kv_head * group + h) * dim;
      std::fill_n(out, dim, 0.0f);
      for (int64_t p = i; p < stop; ++p) {
        const PartialAttention &partial = buffers.partials[p * group + h];
        const float weight = std::exp(partial.highest - highest);
        sum += weight * partial.sum;
        const float *from = buffers.partial_out + (p * group + h) * dim;
        for (int64_t d = 0; d < dim; ++d) out[d] += weight * from[d];
      }
      for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
    }
    i = stop;
  }
}

void Decoder::step(const StepBatch &batch, const std::vector<PagedCache> &caches, float *x, float *y) {
  std::lock_guard lock(busy_);
  const auto [hidden, heads, kv_heads, dim, intermediate, eps, scale] = shape;
  const int64_t m = batch.tokens;
  Buffers buffers;
  buffers.pieces = pieces_of(batch, kv_heads);
  const int64_t partials = static_cast<int64_t>(buffers.pieces.size()) * (heads / kv_heads);
  buffers.partials.resize(partials);
  const int64_t sizes[] = {m * hidden, m * shape.qkv(), partials * dim, m * heads * dim, m * 2 * intermediate, m * intermediate};
  float **const parts[] = {&buffers.normed,   &buffers.qkv,     &buffers.partial_out,
                           &buffers.attended, &buffers.gate_up, &buffers.activated};
  int64_t needed = 0;
  for (const int64_t size : sizes) needed += size;
  if (static_cast<int64_t>(room_.size()) < needed) room_.resize(needed);
  float *next = room_.data();
  for (int i = 0; i < 6; ++i) {
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
    attention(layer, batch, caches[l], buffers);
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
