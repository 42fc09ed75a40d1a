// The product on CUDA cores, for M = 1 .. 4: a warp multiplies TOKENS tokens by ROW_TILES tiles of 32 rows, lane = row, so no sum
// crosses lanes. Codes become fp16 (exact), then fp32; products and sums are fp32 FFMAs, a group's sum is multiplied once
// by its scale. Activations lie in shared memory as fp32, converted once a block and read as a broadcast; two row tiles
// share each read.
#pragma once

#include "layout.cuh"

namespace voltserve {

template <int TOKENS, int ROW_TILES>
struct Fma {
  using X = float;
  template <int GROUP>
  using Weights = LaneTile<GROUP>;
  static constexpr int kTokens = TOKENS, kRowTiles = ROW_TILES;
  static constexpr int kParts = 1, kPartTokens = TOKENS;
  static constexpr float kFactor = kCodeFactor * kScaleFactor;

  float sums[ROW_TILES][TOKENS] = {};

  static __device__ void store_x(float *to, uint4 halves) {
    const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
    float2 f[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = __half22float2(as_half2(words[i]));
    reinterpret_cast<float4 *>(to)[0] = make_float4(f[0].x, f[0].y, f[1].x, f[1].y);
    reinterpret_cast<float4 *>(to)[1] = make_float4(f[2].x, f[2].y, f[3].x, f[3].y);
  }

  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply(const float *x, LaneTile<GROUP> (&tiles)[ROW_TILES], int, Reload reload) {
    constexpr int kWordsPerGroup = GROUP / 8;
    float scales[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      half2 even, odd;
      decode_scales(tiles[r].scales, even, odd);
      scales[r][0] = __low2float(even);
      scales[r][1] = __low2float(odd);
      scales[r][2] = __high2float(even);
      scales[r][3] = __high2float(odd);
      reload.scales(r);
    }
#pragma unroll
    for (int group = 0; group < kTileColumns / GROUP; ++group) {
      float partial[ROW_TILES][TOKENS] = {};
#pragma unroll
      for (int w = 0; w < kWordsPerGroup; ++w) {
        const int word = group * kWordsPerGroup + w;
        float2 weights[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          half2 pairs[4];
          decode_word(tiles[r].word(word), pairs);
#pragma unroll
          for (int p = 0; p < 4; ++p) weights[r][p] = __half22float2(pairs[p]);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const float4 *const at = reinterpret_cast<const float4 *>(x + t * STRIDE + word * 8);
          const float4 a = at[0], b = at[1];
          const float xs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int p = 0; p < 4; ++p) {
              partial[r][t] = fmaf(weights[r][p].x, xs[2 * p], partial[r][t]);
              partial[r][t] = fmaf(weights[r][p].y, xs[2 * p + 1], partial[r][t]);
            }
          }
        }
        if (word % 4 == 3) {
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) reload.half(r, word / 4);
        }
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) sums[r][t] = fmaf(partial[r][t], scales[r][group], sums[r][t]);
      }
    }
  }

  template <class Visit>
  __device__ void part(int, int lane, Visit visit) const {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) visit(t, r * kTileRows + lane, sums[r][t]);
    }
  }
};

}  // namespace voltserve
