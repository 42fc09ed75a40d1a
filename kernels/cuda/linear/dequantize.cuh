// Rows of a packed weight (common/layout.cuh) as fp16, in the order that cuBLAS reads: row-major [rows, k].
//
//     out[r][c] = fp16(e2m1(code) * e4m3(scale) * row_factor)      for rows first_row .. of the weight; FP8: fp16(e4m3(code) * scale)
//
// code * scale is exact in fp16, and for FP8 in fp32. The factor is applied in fp32 and rounded once.
//
// A warp expands one tile of 32 rows by 64 columns at a time. The tile passes through shared memory, so that stores are whole
// 128-byte lines, 8 lanes per row. Bytes per weight: 0.5625 (FP8: 1) read and 2 written, so writing is the bound.
#pragma once

#include <type_traits>

#include "cuda/common/layout.cuh"
#include "cuda/common/layout8.cuh"

namespace voltserve {

constexpr int kDequantizeWarps = 4;

// Columns 8 * word .. 8 * word + 7 of a lane's row but for the row factor, exactly: 2^-8 of their value.
template <int GROUP>
__device__ void exact_pairs(const LaneTile<GROUP> &tile, int word, float2 (&exact)[4]) {
  half2 even, odd;
  decode_scales(tile.scales, even, odd);
  const half2 scale_pairs[4] = {__low2half2(even), __low2half2(odd), __high2half2(even), __high2half2(odd)};
  half2 pairs[4];
  decode_word(tile.word(word), pairs);
#pragma unroll
  for (int p = 0; p < 4; ++p) exact[p] = __half22float2(__hmul2(pairs[p], scale_pairs[word * 8 / GROUP]));
}

template <int GROUP>
__device__ void exact_pairs(const Fp8Tile<GROUP> &tile, int word, float2 (&exact)[4]) {
  const float scale = GROUP == kFp8Blocks ? __half2float(tile.scale) : 1.0f;
  half2 pairs[4];
  tile.decode(word, pairs);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 codes = __half22float2(pairs[p]);
    exact[p] = make_float2(codes.x * scale, codes.y * scale);
  }
}

template <int GROUP>
__global__ void __launch_bounds__(32 * kDequantizeWarps)
    dequantize_kernel(const uint4 *codes, const uint8_t *scales, const float *row_factor, half *out, int first_row, int rows,
                      int k) {
  // 8 chunks of 8 halves per row, and one of padding so that neighbouring rows lie in different banks.
  __shared__ uint4 staged[kDequantizeWarps][kTileRows][9];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_tiles = ceil_div(k, kTileColumns);
  const int column_tile = blockIdx.x * kDequantizeWarps + warp;
  const int tile_row = blockIdx.y;
  if (column_tile >= column_tiles) return;  // whole warps leave, and below only warps synchronize

  std::conditional_t<is_fp8(GROUP), Fp8Tile<GROUP>, LaneTile<GROUP>> tile;
  typename decltype(tile)::Source source;
  source.seek(codes, scales, static_cast<size_t>(first_row / kTileRows + tile_row) * column_tiles + column_tile, lane);
#pragma unroll
  for (int part = 0; part < tile.kParts; ++part) tile.load_part(source, part, true);
  tile.load_scales(source, true);
  const int row = tile_row * kTileRows + lane;
  const float factor = row < rows ? row_factor[first_row + row] * kProductFactor : 0;

#pragma unroll
  for (int word = 0; word < 8; ++word) {
    float2 exact[4];
    exact_pairs(tile, word, exact);
    uint32_t bits[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) bits[p] = as_bits(__floats2half2_rn(exact[p].x * factor, exact[p].y * factor));
    staged[warp][lane][word] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }
  __syncwarp();
  const int column = column_tile * kTileColumns + lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = i * 4 + lane / 8, out_row = tile_row * kTileRows + r;
    if (out_row < rows && column < k) {
      *reinterpret_cast<uint4 *>(out + static_cast<size_t>(out_row) * k + column) = staged[warp][r][lane % 8];
    }
  }
}

}  // namespace voltserve
