// y = x W^T + b, and W itself, for any vector type. Each instruction set's file defines `Vector` and includes this one.
//
// What bounds it. A weight is 0.5625 bytes with its share of the scale (g = 16), and is read once per call for M up to kMaxRows. Decoding
// 8 weights takes about 2.4 vector instructions, and multiplying them M. None crosses lanes, because an accumulator holds one row
// of W per element. At M = 1 that is some 9 weights per clock and core on Zen 3, more than its memory delivers. From M = 4 on the
// FMA units are the bound, and decoding runs beside them on the shuffle unit. So larger M is computed in blocks of kMaxRows,
// without any dequantized copy.
//
// Numerics: contracts/nvfp4.h. Products within a group are summed unscaled in float32, then scaled once.
//
// `Vector` has: width (rows of W it holds, a divisor of kTileRows); max_rows (kMaxRows below); F, its register; zero, load, store,
// broadcast, add, mul, fma(a, b, c) = a * b + c; decode(bytes, nibble, F[4]), the columns of a step in the low (0) or high (1)
// nibbles, for `width` rows; scales(bytes), `width` block scales times 2^-8.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/layout.h"

namespace voltserve::cpu {
namespace {

using F = Vector::F;
constexpr int kVectors = kTileRows / Vector::width;  // vectors per tile of 16 rows
constexpr int kMaxRows = Vector::max_rows;           // rows of x per pass over a tile
constexpr int kCachedRows = 64;                      // rows of x that stay in the second-level cache while tiles pass
constexpr float kScaleUnit = 256.0f;                 // the factor that Vector::scales omits

// One tile times M rows of x, into y; kSteps steps per group.
template <int M, int kSteps>
void tile_times_rows(const Nvfp4Matrix &w, int64_t tile, const float *x, const float *bias, float *y) {
  // With few rows of x, several partial sums per row keep enough multiplications in flight.
  constexpr int kParts = M == 1 ? 4 : M <= 3 ? 2 : 1;
  const int64_t groups = w.columns / w.group_size;
  const uint8_t *packed = w.packed + tile * groups * kSteps * kStepBytes;
  const uint8_t *scales = w.scales + tile * groups * kTileRows;
  F total[kVectors][M];
  for (auto &one : total) std::fill_n(one, M, Vector::zero());
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      F part[M * kParts];
      std::fill_n(part, M * kParts, Vector::zero());
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 2
        for (int nibble = 0; nibble < 2; ++nibble) {  // half the columns at a time; all of them would exceed the registers at M = 8
          F column[kNibbleColumns];
          Vector::decode(packed + s * kStepBytes + v * Vector::width * kStepColumns / 2, nibble, column);
          const float *xs = x + (g * kSteps + s) * kStepColumns + nibble * kNibbleColumns;
#pragma GCC unroll 4
          for (int c = 0; c < kNibbleColumns; ++c) {
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
              F &sum = part[m * kParts + c % kParts];
              sum = Vector::fma(column[c], Vector::broadcast(xs[m * w.columns + c]), sum);
            }
          }
        }
      }
      const F scale = Vector::scales(scales + v * Vector::width);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        F sum = part[m * kParts];
        for (int p = 1; p < kParts; ++p) sum = Vector::add(sum, part[m * kParts + p]);
        total[v][m] = Vector::fma(scale, sum, total[v][m]);
      }
    }
    packed += kSteps * kStepBytes;
    scales += kTileRows;
  }
  const int64_t first = tile * kTileRows;
  const int count = static_cast<int>(std::min<int64_t>(kTileRows, w.rows - first));
  for (int m = 0; m < M; ++m) {
    float sums[kTileRows];
    for (int v = 0; v < kVectors; ++v) Vector::store(sums + v * Vector::width, total[v][m]);
    float *out = y + m * w.rows + first;
    for (int r = 0; r < count; ++r) {
      out[r] = sums[r] * kScaleUnit * w.row_factor[first + r] + (bias ? bias[first + r] : 0.0f);
    }
  }
}

template <int M = kMaxRows>
void tile_times_up_to(int64_t m, const Nvfp4Matrix &w, int64_t tile, const float *x, const float *bias, float *y) {
  if (m == M) {
    return w.group_size == 16 ? tile_times_rows<M, 2>(w, tile, x, bias, y) : tile_times_rows<M, 4>(w, tile, x, bias, y);
  }
  if constexpr (M > 1) tile_times_up_to<M - 1>(m, w, tile, x, bias, y);
}

void linear(const Nvfp4Matrix &w, const float *x, int64_t m, const float *bias, float *y, int64_t tile_begin, int64_t tile_end) {
  for (int64_t cached = 0; cached < m; cached += kCachedRows) {
    const int64_t end = std::min(m, cached + kCachedRows);
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      for (int64_t row = cached; row < end; row += kMaxRows) {
        const int64_t rows = std::min<int64_t>(kMaxRows, end - row);
        tile_times_up_to(rows, w, tile, x + row * w.columns, bias, y + row * w.rows);
      }
    }
  }
}

void dequantize(const Nvfp4Matrix &w, float *out, int64_t tile_begin, int64_t tile_end) {
  const int64_t steps = w.columns / kStepColumns, groups = w.columns / w.group_size;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first = tile * kTileRows;
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, w.rows - first));
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t group = step * kStepColumns / w.group_size;
      float columns[kStepColumns][kTileRows];
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t *bytes = w.packed + (tile * steps + step) * kStepBytes + v * Vector::width * kStepColumns / 2;
        const F scale = Vector::scales(w.scales + (tile * groups + group) * kTileRows + v * Vector::width);
        for (int nibble = 0; nibble < 2; ++nibble) {
          F column[kNibbleColumns];
          Vector::decode(bytes, nibble, column);
          for (int c = 0; c < kNibbleColumns; ++c) {
            Vector::store(columns[nibble * kNibbleColumns + c] + v * Vector::width, Vector::mul(column[c], scale));
          }
        }
      }
      for (int r = 0; r < count; ++r) {
        float *to = out + (first + r) * w.columns + step * kStepColumns;
        for (int c = 0; c < kStepColumns; ++c) to[c] = columns[c][r] * kScaleUnit * w.row_factor[first + r];
      }
    }
  }
}

}  // namespace
}  // namespace voltserve::cpu
