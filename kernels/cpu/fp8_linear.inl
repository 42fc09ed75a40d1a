// y = x W^T + b, and W itself, for FP8 weights and any vector type; included after nvfp4_linear.inl, whose constants it uses.
//
// A tile has 16 rows. Its columns follow one another: 16 bytes per column, one per row. The scales of a tile lie likewise: 16 floats
// per group of columns. A byte becomes a float16 by a shift and a mask (Vector::scales), 2^-8 times its value.
//
// What bounds it: a weight is one byte, read once per call for M up to kMaxRows. Decoding 16 weights takes 4 vector instructions.
//
// Numerics: contracts/fp8.h. Products within a group are summed unscaled in float32, then scaled once.
#include "contracts/fp8.h"

namespace voltserve::cpu {
namespace {

// One tile times M rows of x, into y.
template <int M>
void fp8_tile_times_rows(const Fp8Matrix &w, int64_t tile, const float *x, const float *bias, float *y) {
  constexpr int kParts = M == 1 ? 4 : M <= 3 ? 2 : 1;
  const int64_t groups = w.groups();
  F total[kVectors][M];
  for (auto &one : total) std::fill_n(one, M, Vector::zero());
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * w.group_size, end = std::min(w.columns, begin + w.group_size);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t *bytes = w.packed + tile * w.columns * kTileRows + v * Vector::width;
      F part[M * kParts];
      std::fill_n(part, M * kParts, Vector::zero());
      for (int64_t k = begin; k < end; k += 4) {  // K and group_size are multiples of 16
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          const F column = Vector::scales(bytes + (k + c) * kTileRows);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            F &sum = part[m * kParts + c % kParts];
            sum = Vector::fma(column, Vector::broadcast(x[m * w.columns + k + c]), sum);
          }
        }
      }
      const F scale = Vector::load(w.scales + (tile * groups + g) * kTileRows + v * Vector::width);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        F sum = part[m * kParts];
        for (int p = 1; p < kParts; ++p) sum = Vector::add(sum, part[m * kParts + p]);
        total[v][m] = Vector::fma(scale, sum, total[v][m]);
      }
    }
  }
  const int64_t first = tile * kTileRows;
  const int count = static_cast<int>(std::min<int64_t>(kTileRows, w.rows - first));
  for (int m = 0; m < M; ++m) {
    float sums[kTileRows];
    for (int v = 0; v < kVectors; ++v) Vector::store(sums + v * Vector::width, total[v][m]);
    float *out = y + m * w.rows + first;
    for (int r = 0; r < count; ++r) out[r] = sums[r] * kScaleUnit + (bias ? bias[first + r] : 0.0f);
  }
}

template <int M = kMaxRows>
void fp8_tile_times_up_to(int64_t m, const Fp8Matrix &w, int64_t tile, const float *x, const float *bias, float *y) {
  if (m == M) return fp8_tile_times_rows<M>(w, tile, x, bias, y);
  if constexpr (M > 1) fp8_tile_times_up_to<M - 1>(m, w, tile, x, bias, y);
}

void fp8_linear(const Fp8Matrix &w, const float *x, int64_t m, const float *bias, float *y, int64_t tile_begin, int64_t tile_end) {
  for (int64_t cached = 0; cached < m; cached += kCachedRows) {
    const int64_t end = std::min(m, cached + kCachedRows);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      for (int64_t row = cached; row < end; row += kMaxRows) {
        const int64_t rows = std::min<int64_t>(kMaxRows, end - row);
        fp8_tile_times_up_to(rows, w, tile, x + row * w.columns, bias, y + row * w.rows);
      }
    }
  }
}

void fp8_dequantize(const Fp8Matrix &w, float *out, int64_t tile_begin, int64_t tile_end) {
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = tile * kTileRows;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, w.rows - first));
    for (int64_t k = 0; k < w.columns; ++k) {
      float column[kTileRows];
      const uint8_t *bytes = w.packed + (tile * w.columns + k) * kTileRows;
      for (int v = 0; v < kVectors; ++v) Vector::store(column + v * Vector::width, Vector::scales(bytes + v * Vector::width));
      const float *scales = w.scales + (tile * w.groups() + k / w.group_size) * kTileRows;
      for (int r = 0; r < count; ++r) out[(first + r) * w.columns + k] = column[r] * kScaleUnit * scales[r];
    }
  }
}

}  // namespace
}  // namespace voltserve::cpu
