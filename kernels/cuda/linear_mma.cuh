// The product on Volta's tensor cores, mma.m8n8k4 (HMMA.884): a warp multiplies TOKEN_TILES tiles of 8 tokens by ROW_TILES tiles of
// 32 rows. Each of a warp's four quad-pairs (lanes 4q..4q+3 and 16+4q..16+4q+3) computes its own 8x8x4 product (PTX ISA,
// "Matrix Fragments for mma.m8n8k4 with .f16"): all share the 8 tokens (operand A, row-major) and differ in the 8 rows of W
// (operand B, column-major). A lane supplies 4 consecutive columns of one token and of one row of W, which is the row the packed
// layout has given it: no shuffle, no shared memory for weights.
//
// Weights are code * 2^-14 times scale * 2^6, so code * scale * 2^-8: a multiple of 2^-18 of at most 10.5 and 6 significant
// bits, exact in fp16. Sums are fp32.
#pragma once

#include "layout.cuh"

namespace voltserve {

__device__ inline void mma_m8n8k4(float (&d)[8], half2 a0, half2 a1, half2 b0, half2 b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(as_bits(a0)), "r"(as_bits(a1)), "r"(as_bits(b0)), "r"(as_bits(b1)));
}

template <int TOKEN_TILES, int ROW_TILES>
struct Mma {
  using X = half;
  template <int GROUP>
  using Weights = LaneTile<GROUP>;
  static constexpr int kTokens = 8 * TOKEN_TILES, kRowTiles = ROW_TILES;
  static constexpr int kParts = TOKEN_TILES, kPartTokens = 8;
  static constexpr float kFactor = kScaleFactor;  // 2^-14 is undone in the scales

  float sums[TOKEN_TILES][ROW_TILES][8] = {};

  static __device__ void store_x(half *to, uint4 halves) { *reinterpret_cast<uint4 *>(to) = halves; }

  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply(const half *x, LaneTile<GROUP> (&tiles)[ROW_TILES], int lane, Reload reload) {
    const half *const mine = x + (lane % 4 + lane / 16 * 4) * STRIDE;
    half2 scales[ROW_TILES][4];
    const half2 lift = __float2half2_rn(kCodeFactor);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      half2 even, odd;
      decode_scales(tiles[r].scales, even, odd);
      even = __hmul2(even, lift);
      odd = __hmul2(odd, lift);
      scales[r][0] = __low2half2(even);
      scales[r][1] = __low2half2(odd);
      scales[r][2] = __high2half2(even);
      scales[r][3] = __high2half2(odd);
      reload.scales(r);
    }
#pragma unroll
    for (int word = 0; word < 8; ++word) {
      half2 weights[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        decode_word(tiles[r].word(word), weights[r]);
#pragma unroll
        for (int p = 0; p < 4; ++p) weights[r][p] = __hmul2(weights[r][p], scales[r][word * 8 / GROUP]);
        if (word % 4 == 3) reload.half(r, word / 4);
      }
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; ++t) {
        const uint4 a = *reinterpret_cast<const uint4 *>(mine + t * 8 * STRIDE + word * 8);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          mma_m8n8k4(sums[t][r], as_half2(a.x), as_half2(a.y), weights[r][0], weights[r][1]);
          mma_m8n8k4(sums[t][r], as_half2(a.z), as_half2(a.w), weights[r][2], weights[r][3]);
        }
      }
    }
  }

  // Element i of a lane's sums: token (lane&1) + (i&2) + 4*(lane>=16), column c = (i&4) + (lane&2) + (i&1) of quad-pair q's
  // 8, and column c is the row of W of the c-th lane of the quad-pair.
  template <class Visit>
  __device__ void part(int token_tile, int lane, Visit visit) const {
    const int quad = lane % 16 / 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = (lane & 1) + (i & 2) + lane / 16 * 4;
        const int row = quad * 4 + (lane & 2) + (i & 1) + (i & 4) * 4;
        visit(token, r * kTileRows + row, sums[token_tile][r][i]);
      }
    }
  }
};

}  // namespace voltserve
