// The packed layout of NVFP4 weights on the GPU, and how its bits become numbers. Torch-free; every kernel includes it.
//
// A weight is w[n][k] = e2m1(code[n][k]) * e4m3(block_scale[n][k / group]) * row_factor[n], with group 16 or 32. One packed copy
// serves every kernel. The matrix [N, K] is cut into tiles of 32 rows by 64 columns, padded with zeros:
//
//                     K: 64 columns per tile
//                  +-----------+-----------+----
//     N: 32 rows   | tile 0,0  | tile 0,1  | ...     lane l of a warp owns row l of a tile
//     per tile     +-----------+-----------+----
//                  | tile 1,0  | tile 1,1  | ...
//
//     codes   uint4 [ceil(N/32)][ceil(K/64)][2][32]          [half h][lane]: 32 codes of row `lane`, columns 32h .. 32h+31
//     scales  bytes [ceil(N/32)][ceil(K/64)][32][64/group]   4 (or 2) per lane, see place_scale()
//
// A warp reads a tile with two 128-bit loads and one 32-bit load per lane. All are coalesced; a tile has 1152 bytes at group 16.
//
// Lane = row is also the operand order of mma.m8n8k4 with the four quad-pairs side by side along N. So the same registers feed the
// tensor cores and the dequantizer, without a shuffle.
//
// A 32-bit word holds eight consecutive codes of a row. Columns 2p and 2p+1 (pair p = 0 .. 3) go to its low and high 16 bits. Within
// each half, shifts and masks turn the bits of a pair into two fp16 numbers:
//
//     bit   15 14 13 12 | 11 10 9 | 8 7 6 | 5 4 3 | 2 1 0
//           s0 s2 s3 s1 |   m0    |  m1   |  m2   |  m3      s = sign, m = the three magnitude bits
//
// fp16 has its sign in bit 15, and its low exponent bits and top mantissa bit in 11 .. 9. Pair 0 therefore needs one AND, pair 1
// a shift and an AND, pairs 2 and 3 two shifts and two ANDs each: 11 integer operations for 8 codes. (Four masks with one shift
// each cannot tile 16 bits: a search showed it.) The fp16 number is code * 2^-14 exactly, zero and the subnormal 0.5 included.
//
// A block scale (E4M3) is stored as bits 14 .. 7 of the fp16 number scale * 2^6, without its sign. These bits hold every E4M3
// number. Decoding takes two operations for two scales instead of nine, and products stay within fp16. A negative scale's sign
// moves to its codes.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define VOLTSERVE_BOTH __host__ __device__
#else
#define VOLTSERVE_BOTH
#endif

namespace voltserve {

constexpr int kTileRows = 32;
constexpr int kTileColumns = 64;
constexpr int kTileCodes = 2 * 32;  // uint4 per tile

VOLTSERVE_BOTH constexpr int scale_bytes(int group) { return kTileColumns / group; }  // per lane and tile
VOLTSERVE_BOTH constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A decoded code is 2^-14 of the value, its scale 2^6. The row factor makes up for both, at no cost.
constexpr float kProductFactor = 256.0f;

// The bits of one code in its word; the inverse of decode_word. `column`: 0 .. 7 within the word.
VOLTSERVE_BOTH inline uint32_t place_code(uint32_t code, int column) {
  const int pair = column / 2;
  const uint32_t sign_bit = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
  const uint32_t half = (code >> 3) << sign_bit | (code & 7) << (9 - 3 * pair);
  return half << (16 * (column % 2));
}

// The packed byte of an E4M3 byte, without its sign. E4M3 has 1 sign bit, 4 exponent bits (bias 7) and 3 mantissa bits. The fp16
// exponent of scale * 2^6 is larger by 14. Subnormal scales, m * 2^-9, become normal numbers.
VOLTSERVE_BOTH inline uint32_t place_scale(uint32_t e4m3) {
  const uint32_t magnitude = e4m3 & 0x7F;
  if (magnitude == 0 || magnitude >= 8) return magnitude + (magnitude ? 14 << 3 : 0);
  const uint32_t exponent = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
  return (12 + exponent) << 3 | (magnitude << (3 - exponent) & 7);
}

#ifdef __CUDACC__

__device__ inline half2 as_half2(uint32_t bits) { return *reinterpret_cast<half2 *>(&bits); }
__device__ inline uint32_t as_bits(half2 value) { return *reinterpret_cast<uint32_t *>(&value); }

// The four pairs of codes of a word, each times 2^-14, exactly.
__device__ inline void decode_word(uint32_t word, half2 (&pairs)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x0E000E00u;
  pairs[0] = as_half2(word & (kSign | kMagnitude));
  pairs[1] = as_half2(word << 3 & (kSign | kMagnitude));
  pairs[2] = as_half2((word << 1 & kSign) | (word << 6 & kMagnitude));
  pairs[3] = as_half2((word << 2 & kSign) | (word << 9 & kMagnitude));
}

// Four scale bytes b0 .. b3 (place_scale) as {b0, b2} and {b1, b3}, each times 2^6, exactly. NaN cannot occur: repacking refuses it.
__device__ inline void decode_scales(uint32_t bytes, half2 &even, half2 &odd) {
  even = as_half2((bytes & 0x00FF00FFu) << 7);
  odd = as_half2((bytes >> 1) & 0x7F807F80u);
}

// Weights are read once, so they bypass L1 and leave it to the activations.
__device__ inline uint4 load_codes(const uint4 *address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Addresses of a lane's part of a row of tiles; step<N>() advances N tiles along K.
template <int GROUP>
struct LaneSource {
  const uint4 *codes;
  const uint8_t *scales;

  // `tile`: index among all tiles. 2^32 tiles would be four terabytes of weights.
  __device__ void seek(const uint4 *all_codes, const uint8_t *all_scales, unsigned tile, int lane) {
    codes = all_codes + static_cast<size_t>(tile) * kTileCodes + lane;
    scales = all_scales + (static_cast<size_t>(tile) * kTileRows + lane) * scale_bytes(GROUP);
  }
  // In PTX, because the compiler would add in two registers that are no pair, and copy them for each load.
  template <int TILES>
  __device__ void step() {
    asm volatile("add.u64 %0, %0, %1;" : "+l"(codes) : "n"(TILES * kTileCodes * sizeof(uint4)));
    asm volatile("add.u64 %0, %0, %1;" : "+l"(scales) : "n"(TILES * kTileRows * scale_bytes(GROUP)));
  }
};

// A lane's part of one tile in registers: row `lane`, 64 columns. It is loaded in three parts, so that each can be refilled for
// the next stage as soon as it is used.
template <int GROUP>
struct LaneTile {
  using Source = LaneSource<GROUP>;
  static constexpr int kParts = 2;

  uint4 codes[kParts] = {};
  uint32_t scales = 0;

  // Outside the matrix a lane keeps its old values. Any bits decode to finite numbers; they are multiplied by activations of zero,
  // or belong to rows that are not written.
  __device__ void load_part(const Source &source, int part, bool inside) {
    if (inside) codes[part] = load_codes(source.codes + 32 * part);
  }
  __device__ void load_scales(const Source &source, bool inside) {
    if (!inside) return;
    scales = GROUP == 16 ? __ldg(reinterpret_cast<const uint32_t *>(source.scales))
                         : __ldg(reinterpret_cast<const uint16_t *>(source.scales));
  }
  // All loaded bits folded into one word, for await().
  __device__ uint32_t all_bits() const {
    return scales ^ codes[0].x ^ codes[0].y ^ codes[0].z ^ codes[0].w ^ codes[1].x ^ codes[1].y ^ codes[1].z ^ codes[1].w;
  }
  __device__ uint32_t word(int index) const {  // index a compile-time constant after unrolling
    const uint4 &quad = codes[index / 4];
    return index % 4 == 0 ? quad.x : index % 4 == 1 ? quad.y : index % 4 == 2 ? quad.z : quad.w;
  }
};

#endif  // __CUDACC__

}  // namespace voltserve
