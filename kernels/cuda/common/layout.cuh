// The packed layout of NVFP4 weights on the GPU, and how its bits become numbers. Torch-free; included by every kernel.
//
// A weight [N, K] is w[n][k] = e2m1(code) * e4m3(block scale of n, k / group) * row_factor[n], group 16 or 32. One packed
// copy serves every kernel. It is cut into tiles of 32 rows by 64 columns, zero-padded, and in a tile **lane = row**:
//
//   codes   uint4 [ceil(N/32)][ceil(K/64)][2][32]   [half h][lane]: 32 codes of row `lane`, columns 32h .. 32h+31
//   scales  bytes [ceil(N/32)][ceil(K/64)][32][64/group]   4 (or 2) a lane, see place_scale()
//
// so a warp reads a tile with two 128-bit loads and one 32-bit load a lane, all coalesced, 1152 B in all. Lane = row is
// also the operand order of mma.m8n8k4 with the four quad-pairs side by side along N, so the same registers feed tensor
// cores and the dequantizer without a shuffle.
//
// Eight consecutive codes of a row make one 32-bit word of a uint4: columns 2p and 2p+1 (pair p = 0..3) go to its low and
// high 16 bits. In each half the bits of the four pairs are spread so that a pair becomes two fp16 numbers by shift and mask:
//
//   bit   15 14 13 12 | 11 10 9 | 8 7 6 | 5 4 3 | 2 1 0
//         s0 s2 s3 s1 |   m0    |  m1   |  m2   |  m3      s = sign, m = the three magnitude bits
//
// fp16 keeps its sign in bit 15 and the low exponent bits and the top mantissa bit in 11..9, so pair 0 needs one AND, pair 1
// a shift by 3 and an AND, pairs 2 and 3 two shifts and two ANDs: 11 integer operations for 8 codes. (Four masks that each
// need one shift cannot tile 16 bits: checked by search.) The fp16 number is code * 2^-14 exactly, zero and the
// subnormal 0.5 included.
//
// A block scale, E4M3, is stored as the bits 14..7 of scale * 2^6 in fp16, which hold every such number without its sign: two
// operations for two scales, and products that fp16 can hold, instead of nine. A negative scale's sign is moved to its codes.
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
constexpr int kTileCodes = 2 * 32;  // uint4 in a tile

VOLTSERVE_BOTH constexpr int scale_bytes(int group) { return kTileColumns / group; }  // a lane and tile
VOLTSERVE_BOTH constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a decoded code (2^-14) times its scale (2^6) is short of; folded into the row factor, so it costs nothing.
constexpr float kProductFactor = 256.0f;

// One code to its bit positions in a word; the inverse of decode_pair. `column` is 0..7 in the word.
VOLTSERVE_BOTH inline uint32_t place_code(uint32_t code, int column) {
  const int pair = column / 2;
  const uint32_t sign_bit = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
  const uint32_t half = (code >> 3) << sign_bit | (code & 7) << (9 - 3 * pair);
  return half << (16 * (column % 2));
}

// An E4M3 byte to its byte in the packed layout, without its sign. E4M3 is 1 sign, 4 exponent bits (bias 7), 3 of mantissa; the
// fp16 exponent of scale * 2^6 is 14 more. Subnormal scales, m * 2^-9, become normal numbers.
VOLTSERVE_BOTH inline uint32_t place_scale(uint32_t e4m3) {
  const uint32_t magnitude = e4m3 & 0x7F;
  if (magnitude == 0 || magnitude >= 8) return magnitude + (magnitude ? 14 << 3 : 0);
  const uint32_t exponent = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
  return (12 + exponent) << 3 | (magnitude << (3 - exponent) & 7);
}

#ifdef __CUDACC__

__device__ inline half2 as_half2(uint32_t bits) { return *reinterpret_cast<half2 *>(&bits); }
__device__ inline uint32_t as_bits(half2 value) { return *reinterpret_cast<uint32_t *>(&value); }

// Four pairs of codes of a word, each times 2^-14, exact.
__device__ inline void decode_word(uint32_t word, half2 (&pairs)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x0E000E00u;
  pairs[0] = as_half2(word & (kSign | kMagnitude));
  pairs[1] = as_half2(word << 3 & (kSign | kMagnitude));
  pairs[2] = as_half2((word << 1 & kSign) | (word << 6 & kMagnitude));
  pairs[3] = as_half2((word << 2 & kSign) | (word << 9 & kMagnitude));
}

// Four scale bytes b0..b3 (place_scale): {b0, b2} and {b1, b3}, each times 2^6, exact. NaN (0x7F) does not come here: repacking
// reports it.
__device__ inline void decode_scales(uint32_t bytes, half2 &even, half2 &odd) {
  even = as_half2((bytes & 0x00FF00FFu) << 7);
  odd = as_half2((bytes >> 1) & 0x7F807F80u);
}

// Weights pass once: read them past L1, which is left to the activations.
__device__ inline uint4 load_codes(const uint4 *address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Where a lane's share of a row tile is in memory; step<N>() goes N tiles along K.
template <int GROUP>
struct LaneSource {
  const uint4 *codes;
  const uint8_t *scales;

  // `tile`: of all; 2^32 of them are four terabytes of weights.
  __device__ void seek(const uint4 *all_codes, const uint8_t *all_scales, unsigned tile, int lane) {
    codes = all_codes + static_cast<size_t>(tile) * kTileCodes + lane;
    scales = all_scales + (static_cast<size_t>(tile) * kTileRows + lane) * scale_bytes(GROUP);
  }
  // In PTX: the compiler would add in two registers that are not a pair, and copy them for each load.
  template <int TILES>
  __device__ void step() {
    asm volatile("add.u64 %0, %0, %1;" : "+l"(codes) : "n"(TILES * kTileCodes * sizeof(uint4)));
    asm volatile("add.u64 %0, %0, %1;" : "+l"(scales) : "n"(TILES * kTileRows * scale_bytes(GROUP)));
  }
};

// A lane's share of one tile in registers: row `lane`, 64 columns. Loaded in three parts, so that each can be replaced by the
// next stage's as soon as it is used.
template <int GROUP>
struct LaneTile {
  using Source = LaneSource<GROUP>;
  static constexpr int kHalves = 2;

  uint4 codes[kHalves] = {};
  uint32_t scales = 0;

  // Outside of the matrix a lane keeps what it has: any bits are finite numbers, and are multiplied by activations of zero or
  // summed in rows that are not written.
  __device__ void load_half(const Source &source, int half, bool inside) {
    if (inside) codes[half] = load_codes(source.codes + 32 * half);
  }
  __device__ void load_scales(const Source &source, bool inside) {
    if (!inside) return;
    scales = GROUP == 16 ? __ldg(reinterpret_cast<const uint32_t *>(source.scales))
                         : __ldg(reinterpret_cast<const uint16_t *>(source.scales));
  }
  // All of it folded into a word, to wait for.
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
