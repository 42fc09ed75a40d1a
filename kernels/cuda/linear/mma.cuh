// Multiplication on tensor cores: a warp multiplies TOKENS tokens by ROW_TILES tiles of 32 rows of W. Weights need neither a shuffle
// nor shared memory: a lane supplies columns of the one row of W that the packed layout gave it.
//
// Volta: mma.m8n8k4 (HMMA.884). Each of a warp's four quad-pairs computes its own 8x8x4 product (PTX ISA, "Matrix Fragments for
// mma.m8n8k4 with .f16"). All four share operand A, 8 tokens, and differ in operand B, the 8 rows of W that are their lanes' own:
//
//                    quad-pair 0      1        2        3         lanes of quad-pair q: 4q .. 4q+3 and 16+4q .. 16+4q+3
//               W:   rows 0-3,16-19  4-7,..   8-11,..  12-15,..   (lane = row)
//     8 tokens  A    +--------------+--------+--------+--------+
//     x 4 cols       |   8 x 8      |  8 x 8 |  8 x 8 |  8 x 8 |  one instruction: 8 tokens, 32 rows, 4 columns
//                    +--------------+--------+--------+--------+
//
// Ampere and later emulate m8n8k4, so they use mma.m16n8k16. Its operand A expects the four lanes of a quad to supply columns of
// one row. Here each supplies 4 columns of its own row, at four of the 16 positions along k. Operand B undoes the mix: its column
// 4s + j holds token s at lane j's positions and zeros elsewhere. So column 4s + j of D is token s times the row of the quad's lane
// j. Rows 8 .. 15 of A are a second row tile. One instruction does 2 tokens, 64 rows, 4 columns: a quarter of its multiplications
// count. Loads, decoding and order of sums are the same as on Volta.
//
// Numerics: a weight in fp16 is code * 2^-14 times scale * 2^6. That is a multiple of 2^-18, at most 10.5, with 6 significant bits,
// so it is exact. FP8: common/layout8.cuh. Products and sums are fp32.
#pragma once

#include <type_traits>

#include "cuda/common/layout.cuh"
#include "cuda/common/layout8.cuh"

namespace voltserve {

__device__ inline void mma_m8n8k4(float (&d)[8], half2 a0, half2 a1, half2 b0, half2 b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(as_bits(a0)), "r"(as_bits(a1)), "r"(as_bits(b0)), "r"(as_bits(b1)));
}

__device__ inline void mma_m16n8k16(float (&d)[4], half2 a0, half2 a1, half2 a2, half2 a3, half2 b0, half2 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(as_bits(a0)), "r"(as_bits(a1)), "r"(as_bits(a2)), "r"(as_bits(a3)), "r"(as_bits(b0)), "r"(as_bits(b1)));
}

// A warp's sums, TOKENS tokens by ROW_TILES tiles of 32 rows, and the instructions that add to them.
#if __CUDA_ARCH__ >= 800
template <int TOKENS, int ROW_TILES>
struct Accumulator {
  static constexpr int kPairs = ceil_div(TOKENS, 2), kTilePairs = ceil_div(ROW_TILES, 2);
  static constexpr int kOperands = ROW_TILES > 2 ? 2 : 4;  // in flight

  float sums[kPairs][kTilePairs][4] = {};
  uint4 operands[kOperands] = {};  // stay zero in lanes that read nothing

  // The token whose activations this lane reads.
  static __device__ int token(int lane) { return lane / 16; }
  // Adds columns 8 * word .. 8 * word + 7 of a tile: activations `x` in shared memory, from the lane's token on, times `weights` of
  // this lane's rows.
  template <int STRIDE>
  __device__ void add(const half *x, int word, const half2 (&weights)[ROW_TILES][4], int lane) {
    const half2 none = __float2half2_rn(0);
    const unsigned reads = lane / 4 % 4 == lane % 4;
    const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(x));
#pragma unroll
    for (int first = 0; first < kPairs; first += kOperands) {
      constexpr int kAtOnce = kPairs < kOperands ? kPairs : kOperands;
      auto operand = [&](int s) -> uint4 & { return operands[(word * kPairs + first + s) % kOperands]; };
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        uint4 &b = operand(s);
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(b.x), "+r"(b.y), "+r"(b.z), "+r"(b.w)
                     : "r"(from + 2 * (2 * (first + s) * STRIDE + 8 * word)), "r"(reads));
      }
      // Instructions that add to the same sums are kept apart, because each waits for the one before.
#pragma unroll
      for (int h = 0; h < 4; h += 2) {
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const uint4 &b = operand(s);
#pragma unroll
          for (int r = 0; r < kTilePairs; ++r) {
            const bool both = 2 * r + 1 < ROW_TILES;
            const auto &low = weights[2 * r], &high = weights[both ? 2 * r + 1 : 2 * r];
            mma_m16n8k16(sums[first + s][r], low[h], both ? high[h] : none, low[h + 1], both ? high[h + 1] : none,
                         as_half2(h ? b.z : b.x), as_half2(h ? b.w : b.y));
          }
        }
      }
    }
  }
  // Calls visit(token, row, sum) for this lane's sums of tokens first .. first + COUNT - 1.
  template <int COUNT, class Visit>
  __device__ void each(int first, int lane, Visit visit) const {
#pragma unroll
    for (int s = 0; s < COUNT / 2; ++s) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = lane % 4 * 2 + i;
          visit(2 * s + column / 4, r * kTileRows + lane / 4 * 4 + column % 4, sums[first / 2 + s][r / 2][r % 2 * 2 + i]);
        }
      }
    }
  }
};
#else
template <int TOKENS, int ROW_TILES>
struct Accumulator {
  static constexpr int kTokenTiles = ceil_div(TOKENS, 8), kTile = TOKENS < 8 ? TOKENS : 8;
  float sums[kTokenTiles][ROW_TILES][8] = {};

  // Where tokens are fewer than 8, the last stands in for the missing ones.
  static __device__ int token(int lane) { return min(lane % 4 + lane / 16 * 4, kTile - 1); }
  template <int STRIDE>
  __device__ void add(const half *x, int word, const half2 (&weights)[ROW_TILES][4], int) {
    constexpr int kAtOnce = kTokenTiles < 4 ? kTokenTiles : 4;
#pragma unroll
    for (int first = 0; first < kTokenTiles; first += kAtOnce) {
      uint4 a[kAtOnce];
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) a[t] = *reinterpret_cast<const uint4 *>(x + (first + t) * 8 * STRIDE + 8 * word);
      auto multiply = [&](int t, int r, int h) {
        mma_m8n8k4(sums[first + t][r], as_half2(h ? a[t].z : a[t].x), as_half2(h ? a[t].w : a[t].y), weights[r][2 * h],
                   weights[r][2 * h + 1]);
      };
      // An instruction waits for the one before on the same sums, so those of other tokens come between. With one tile of tokens
      // there are no others; memory is the bound then, and this order takes the fewest registers.
      constexpr bool kOneTile = kAtOnce == 1;
#pragma unroll
      for (int i = 0; i < (kOneTile ? ROW_TILES : 2); ++i) {
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t) {
#pragma unroll
          for (int j = 0; j < (kOneTile ? 2 : ROW_TILES); ++j) multiply(t, kOneTile ? i : j, kOneTile ? j : i);
        }
      }
    }
  }
  // Element i of a lane's sums is token (lane & 1) + (i & 2) + 4 * (lane >= 16), and column c = (i & 4) + (lane & 2) + (i & 1) of the
  // quad-pair's 8. Column c is the row of W that belongs to the c-th lane of the quad-pair.
  template <int COUNT, class Visit>
  __device__ void each(int first, int lane, Visit visit) const {
    const int quad = lane % 16 / 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = (lane & 1) + (i & 2) + lane / 16 * 4;
        const int row = quad * 4 + (lane & 2) + (i & 1) + (i & 4) * 4;
        if (COUNT == 8 || token < COUNT) visit(token, r * kTileRows + row, sums[first / 8][r][i]);
      }
    }
  }
};
#endif

template <int TOKENS, int ROW_TILES>
struct Mma {
  template <int GROUP>
  using Weights = std::conditional_t<is_fp8(GROUP), Fp8Tile<GROUP>, LaneTile<GROUP>>;
  static constexpr int kTokens = TOKENS, kRowTiles = ROW_TILES;
  static constexpr int kPartTokens = TOKENS < 8 ? TOKENS : 8, kParts = TOKENS / kPartTokens;

  Accumulator<TOKENS, ROW_TILES> accumulator;

  static __device__ int token(int lane) { return Accumulator<TOKENS, ROW_TILES>::token(lane); }
  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply(const half *x, Weights<GROUP> (&tiles)[ROW_TILES], int lane, Reload reload) {
    if constexpr (is_fp8(GROUP)) {
      multiply_fp8<GROUP, STRIDE>(x, tiles, lane, reload);
    } else {
      multiply_nvfp4<GROUP, STRIDE>(x, tiles, lane, reload);
    }
  }

  template <class Visit>
  __device__ void part(int part, int lane, Visit visit) const {
    accumulator.template each<kPartTokens>(part * kPartTokens, lane, visit);
  }

 private:
  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply_nvfp4(const half *x, LaneTile<GROUP> (&tiles)[ROW_TILES], int lane, Reload reload) {
    half2 scales[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      half2 even, odd;
      decode_scales(tiles[r].scales, even, odd);
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
        if (word % 4 == 3) reload.part(r, word / 4);
      }
      accumulator.template add<STRIDE>(x, word, weights, lane);
    }
  }

  template <int GROUP, int STRIDE, class Reload>
  __device__ void multiply_fp8(const half *x, Fp8Tile<GROUP> (&tiles)[ROW_TILES], int lane, Reload reload) {
    half2 scales[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      scales[r] = __half2half2(tiles[r].scale);
      reload.scales(r);
    }
#pragma unroll
    for (int word = 0; word < 8; ++word) {
      half2 weights[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        tiles[r].decode(word, weights[r]);
        if constexpr (GROUP == kFp8Blocks) {
#pragma unroll
          for (int p = 0; p < 4; ++p) weights[r][p] = __hmul2(weights[r][p], scales[r]);
        }
        if (word % 2 == 1) reload.part(r, word / 2);
      }
      accumulator.template add<STRIDE>(x, word, weights, lane);
    }
  }
};

}  // namespace voltserve
