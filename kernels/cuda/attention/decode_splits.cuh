// Split-KV: how the positions of a batch are cut into splits. Only the GPU knows the lengths, which change under a captured graph.
#pragma once

#include "cuda/attention/pages.cuh"
#include "cuda/attention/plan.h"

namespace voltserve {

constexpr int kShortestSplit = 64;  // positions
constexpr int kRadix = 16;          // splits that are added up at once

// Every block computes this from seq_lens, with the same outcome.
struct Splits {
  const AttentionArgs &args;
  int tile, own_tiles;  // own_tiles: of the request whose number is the lane's. Few batches have more than 32 requests.
  int split_tiles;
  float reciprocal;  // of split_tiles

  // `most`: AttentionPlan::splits, the blocks of the grid.
  __device__ Splits(const AttentionArgs &a, int tile_, int most) : args(a), tile(tile_) {
    const int lane = threadIdx.x % 32;
    own_tiles = lane < args.requests ? look(lane) : 0;
    const int total = sum_over(args.requests, [&](int b) { return tiles(b); });
    // The shortest splits that are few enough: blocks then fill the GPU and finish together. Each request's last split may be short,
    // so splits for `most - requests` full ones are always enough.
    int low = max(1, ceil_div(total, most)), high = max(low, ceil_div(total, max(1, most - args.requests)));
    while (low < high) {
      set((low + high) / 2);
      if (sum_over(args.requests, [&](int b) { return splits(b); }) <= most) {
        high = split_tiles;
      } else {
        low = split_tiles + 1;
      }
    }
    // Splits of fewer than kShortestSplit positions cost more in adding up than they gain.
    set(max(low, kShortestSplit / tile));
  }
  __device__ void set(int length) {
    split_tiles = length;
    reciprocal = __frcp_rn(static_cast<float>(length));
  }
  // The first position that the request's first token sees, rounded down to a group of 8.
  __device__ int begin(const Query &query) const { return query.begin(0, args.window) & ~7; }
  __device__ int look(int b) const {
    const Query query(args, b);
    return query.count > 0 && query.count <= kDecodeTokens ? ceil_div(query.length - begin(query), tile) : 0;
  }
  // Of request b; lane b % 32 asks.
  __device__ int tiles(int b) const { return b < 32 ? own_tiles : look(b); }
  // ceil_div by a reciprocal. It is exact because tiles and split_tiles are below 2^20.
  __device__ int splits_of(int tiles) const {
    return static_cast<int>((static_cast<float>(tiles + split_tiles - 1) + 0.5f) * reciprocal);
  }
  __device__ int splits(int b) const { return splits_of(tiles(b)); }
};

// The largest power of two of splits, up to kRadix, whose float4 values, `fours` each, do not exceed `most`.
VOLTSERVE_BOTH constexpr int members_at_once(int fours, int most) {
  int members = kRadix;
  while (members > 1 && members * fours > most) members /= 2;
  return members;
}

}  // namespace voltserve
