// The packed layout of FP8 (E4M3) weights on the GPU, and how its bits become numbers. Torch-free.
//
// A weight is w[n][k] = e4m3(code[n][k]) * scale. One packed copy serves every kernel, in the tiles of common/layout.cuh: 32 rows, one
// per lane, by 64 columns, padded with zeros. A code is one byte, so a lane has four 128-bit vectors per tile:
//
//     codes   uint4 [ceil(N/32)][ceil(K/64)][4][32]      [quarter q][lane]: 16 codes of row `lane`, columns 16q .. 16q+15
//     scales  half [ceil(N/32)][ceil(K/64)][32]          only where there is a scale per block of 128 columns; see tile_scale()
//
// A word holds four consecutive codes of a row. Columns 0 and 1 (pair 0) go to its low and high 16 bits, columns 2 and 3 (pair 1)
// likewise. Within each half:
//
//     bit   15 | 14 | 13 .. 7 | 6 .. 0
//           s0 | s1 |   m0    |   m1         s = sign, m = the four exponent and three mantissa bits of E4M3
//
// fp16 has its sign in bit 15, four low exponent bits in 13 .. 10 and three top mantissa bits in 9 .. 7. Pair 0 therefore needs one AND,
// pair 1 two shifts and two ANDs: 5 integer operations for 4 codes. The fp16 number is code * 2^-8 exactly, for zero, subnormal and
// normal codes alike, since the exponents' biases, 15 and 7, differ by 8. NaN cannot occur: repacking refuses it.
//
// One scale per row (or per tensor) is the row factor, applied to sums in fp32. With blocks, a weight in fp16 is code * 2^-8 times the
// tile's scale: both are rounded to fp16 once, by 2^-11 of itself at most.
#pragma once

#include "cuda/common/layout.cuh"

namespace voltserve {

// What stands for a group size in templates and plans.
constexpr int kFp8Rows = 0;      // one scale per row
constexpr int kFp8Blocks = 128;  // one per row and block of 128 columns
constexpr int kFp8Quarters = 4;
constexpr int kFp8TileCodes = kFp8Quarters * 32;  // uint4 per tile

VOLTSERVE_BOTH constexpr bool is_fp8(int group) { return group == kFp8Rows || group == kFp8Blocks; }

// The bits of one code in its word; the inverse of fp8_pair. `column`: 0 .. 3 within the word.
VOLTSERVE_BOTH inline uint32_t place_fp8(uint32_t code, int column) {
  const bool first = column < 2;
  const uint32_t half = (code >> 7) << (first ? 15 : 14) | (code & 0x7F) << (first ? 7 : 0);
  return half << (16 * (column % 2));
}

// The bits of the two fp16 numbers of a pair, each code * 2^-8.
VOLTSERVE_BOTH inline uint32_t fp8_pair(uint32_t word, int pair) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x3F803F80u;
  return pair == 0 ? word & (kSign | kMagnitude) : (word << 1 & kSign) | (word << 7 & kMagnitude);
}

#ifdef __CUDACC__

// As LaneSource of common/layout.cuh.
template <int GROUP>
struct Fp8Source {
  static_assert(is_fp8(GROUP));
  const uint4 *codes;
  const half *scales;

  __device__ void seek(const uint4 *all_codes, const uint8_t *all_scales, unsigned tile, int lane) {
    codes = all_codes + static_cast<size_t>(tile) * kFp8TileCodes + lane;
    scales = reinterpret_cast<const half *>(all_scales) + static_cast<size_t>(tile) * kTileRows + lane;
  }
  template <int TILES>
  __device__ void step() {
    asm volatile("add.u64 %0, %0, %1;" : "+l"(codes) : "n"(TILES * kFp8TileCodes * sizeof(uint4)));
    if constexpr (GROUP == kFp8Blocks) asm volatile("add.u64 %0, %0, %1;" : "+l"(scales) : "n"(TILES * kTileRows * sizeof(half)));
  }
};

// As LaneTile of common/layout.cuh: row `lane`, 64 columns, refilled a quarter at a time.
template <int GROUP>
struct Fp8Tile {
  using Source = Fp8Source<GROUP>;
  static constexpr int kParts = kFp8Quarters;

  uint4 codes[kParts] = {};
  half scale = __ushort_as_half(0);

  __device__ void load_part(const Source &source, int part, bool inside) {
    if (inside) codes[part] = load_codes(source.codes + 32 * part);
  }
  __device__ void load_scales(const Source &source, bool inside) {
    if constexpr (GROUP == kFp8Blocks) {
      if (inside) scale = __ldg(source.scales);
    }
  }
  __device__ uint32_t all_bits() const {
    uint32_t bits = __half_as_ushort(scale);
#pragma unroll
    for (const uint4 &quarter : codes) bits ^= quarter.x ^ quarter.y ^ quarter.z ^ quarter.w;
    return bits;
  }
  // Columns 8 * word .. 8 * word + 7 as four pairs, each code * 2^-8.
  __device__ void decode(int word, half2 (&pairs)[4]) const {
    const uint4 &quarter = codes[word / 2];
    const uint32_t words[2] = {word % 2 ? quarter.z : quarter.x, word % 2 ? quarter.w : quarter.y};
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = as_half2(fp8_pair(words[p / 2], p % 2));
  }
};

#endif  // __CUDACC__

}  // namespace voltserve
