// Canonical FP8 codes and scales to the packed layout (common/layout8.cuh), once, at load.
//
// Codes: a thread writes one uint4, 16 codes of a row. Rows past n and columns past k become zeros. The packed layout cannot represent
// NaN, so NaN is reported: *nan_row becomes 1 + one of the rows with one.
//
// Scales: a thread has one row. With one scale per row that is the row factor. With one per block of 128 columns the factor is a power
// of two, 2^-15 times the first that is no less than the row's largest scale. A tile's scale, fp16(scale / factor), is thus 2^15 at
// most, and its product with code * 2^-8 (1.75 at most) stays within fp16. A scale 2^29 times smaller than the largest of its row
// still has all its bits.
#pragma once

#include "contracts/nvfp4.h"
#include "cuda/common/layout8.cuh"

namespace voltserve {

__global__ void fp8_repack_kernel(const uint8_t *codes, uint4 *packed, int *nan_row, int n, int k) {
  const int column_tiles = ceil_div(k, kTileColumns);
  const size_t index = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t tile = index / kFp8TileCodes;
  if (tile >= static_cast<size_t>(ceil_div(n, kTileRows)) * column_tiles) return;
  const int quarter = index / 32 % kFp8Quarters, lane = index % 32;
  const size_t row = tile / column_tiles * kTileRows + lane;
  const int column = static_cast<int>(tile % column_tiles) * kTileColumns + quarter * 16;

  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (row >= n || column + i >= k) break;
    const uint32_t code = codes[row * k + column + i];
    if ((code & kE4m3Nan) == kE4m3Nan) *nan_row = static_cast<int>(row + 1);
    words[i / 4] |= place_fp8(code, i % 4);
  }
  packed[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void fp8_scales_kernel(const float *scales, float *row_factor, half *tile_scales, int n, int k, int group) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, column_tiles = ceil_div(k, kTileColumns);
  if (row >= ceil_div(n, kTileRows) * kTileRows) return;
  if (group == kFp8Rows) {
    row_factor[row] = row < n ? scales[row] : 0;
    return;
  }
  const int groups = ceil_div(k, kFp8Blocks);
  const float *own = scales + static_cast<size_t>(row) * groups;
  float largest = 0;
  for (int g = 0; g < groups && row < n; ++g) largest = fmaxf(largest, own[g]);
  int exponent = 0;
  frexpf(largest, &exponent);  // largest <= 2^exponent
  const float factor = ldexpf(1.0f, exponent - 15);
  row_factor[row] = factor;
  for (int t = 0; t < column_tiles; ++t) {
    const float scale = row < n ? own[t * kTileColumns / kFp8Blocks] / factor : 0;
    tile_scales[(static_cast<size_t>(row / kTileRows) * column_tiles + t) * kTileRows + row % kTileRows] = __float2half_rn(scale);
  }
}

}  // namespace voltserve
