// Canonical codes and scales to the packed layout (common/layout.cuh), once, at load.
//
// A thread writes one uint4: 32 codes of a row, and the one or two scales of those columns. A scale's sign moves to its codes. Rows
// past n and columns past k become zeros. The packed layout cannot represent NaN, so NaN among the scales is reported:
// *first_nan becomes 1 + the index of one NaN in `scales`.
#pragma once

#include "contracts/nvfp4.h"
#include "cuda/common/layout.cuh"

namespace voltserve {

// codes [n, k/2], the even column in the low nibble; scales [n, k/group]; packed and packed_scales as in common/layout.cuh.
template <int GROUP>
__global__ void repack_kernel(const uint8_t *codes, const uint8_t *scales, uint4 *packed, uint8_t *packed_scales, int *first_nan,
                              int n, int k) {
  const int column_tiles = ceil_div(k, kTileColumns);
  const size_t index = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t tile = index / kTileCodes;
  const int half_tile = index / 32 % 2, lane = index % 32;
  const size_t row = tile / column_tiles * kTileRows + lane;
  const int column = static_cast<int>(tile % column_tiles) * kTileColumns + half_tile * 32;
  if (tile >= static_cast<size_t>(ceil_div(n, kTileRows)) * column_tiles) return;

  const bool row_inside = row < n;
  uint32_t negative = 0;  // one bit per group
  for (int i = 0; i < 32 / GROUP; ++i) {
    const int c = column + i * GROUP;
    const bool inside = row_inside && c < k;
    const size_t from = row * (k / GROUP) + c / GROUP;
    const uint8_t scale = inside ? scales[from] : 0;
    if ((scale & kE4m3Nan) == kE4m3Nan) *first_nan = static_cast<int>(from + 1);
    negative |= (scale >> 7) << i;
    packed_scales[(tile * kTileRows + lane) * scale_bytes(GROUP) + half_tile * (32 / GROUP) + i] = place_scale(scale);
  }
  uint32_t words[4] = {};
  for (int i = 0; i < 32; i += 2) {
    if (!row_inside || column + i >= k) break;
    const uint32_t byte = codes[row * (k / 2) + (column + i) / 2], sign = (negative >> (i / GROUP) & 1) << 3;
    words[i / 8] |= place_code((byte & 15) ^ sign, i % 8) | place_code(byte >> 4 ^ sign, i % 8 + 1);
  }
  packed[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace voltserve
