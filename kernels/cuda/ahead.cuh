// The device's side of reading ahead (ahead.h).
#pragma once

#include "ahead.h"
#include "dependent.cuh"

namespace voltserve {

// All threads of block `part` of the `parts` that read: a warp a stage of a block of the product, a lane a word of each sector of 32
// bytes, which then is in the L2. Waits for no earlier kernel.
__device__ inline void read_ahead(const Ahead &ahead, unsigned part, unsigned parts) {
  constexpr int kSector = 32, kTileBytes = kTileRows * kTileColumns / 2;
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int piece = part * warps + threadIdx.x / 32; piece < ahead.blocks * ahead.depth; piece += parts * warps) {
    const int before = piece / ahead.blocks, stage = stage_ahead(ahead, piece - before * ahead.blocks, before);
    if (stage < 0) continue;
    const int tile = stage / ahead.stages, column = (stage - tile * ahead.stages) * kAheadColumnTiles;
    // At the matrix's ends its last tiles are read again.
    const int last_column = min(kAheadColumnTiles, ahead.column_tiles - column) - 1, last_row = ahead.tile_rows - 1;
    auto first = [&](int r) { return static_cast<size_t>(min(tile * kAheadRowTiles + r, last_row)) * ahead.column_tiles + column; };
    auto word = [](const unsigned char *address) { return __ldcg(reinterpret_cast<const uint32_t *>(address)); };
    uint32_t codes[kAheadRowTiles][kAheadColumnTiles];
#pragma unroll
    for (int r = 0; r < kAheadRowTiles; ++r) {
      const unsigned char *const from = ahead.codes + first(r) * kTileBytes + lane * kSector;
#pragma unroll
      for (int c = 0; c < kAheadColumnTiles; ++c) codes[r][c] = word(from + min(c, last_column) * kTileBytes);
    }
    // Half of the lanes for each row tile's scales.
    const int sectors = (last_column + 1) * kTileRows * ahead.scale_bytes / kSector;
    uint32_t seen = word(ahead.scales + first(lane / 16) * kTileRows * ahead.scale_bytes + min(lane % 16, sectors - 1) * kSector);
#pragma unroll
    for (int r = 0; r < kAheadRowTiles; ++r) {
#pragma unroll
      for (int c = 0; c < kAheadColumnTiles; ++c) seen ^= codes[r][c];
    }
    need(seen);
  }
}

}  // namespace voltserve
