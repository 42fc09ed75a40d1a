// How the positions of a batch are cut into runs, which only the GPU can tell: lengths change while a captured graph stays.
#pragma once

#include "cuda/attention/pages.cuh"
#include "cuda/attention/plan.h"

namespace voltserve {

constexpr int kShortestRun = 64;  // positions
constexpr int kRadix = 16;        // runs that are added up at once

// How the batch's positions are cut, the same for every block.
struct Runs {
  const AttentionArgs &args;
  int tile, own_tiles;  // own_tiles: of the request that is this lane's number, which most batches have no more of
  int run_tiles;
  float reciprocal;  // of run_tiles

  // `units`: AttentionPlan::units, which the runs must not exceed.
  __device__ Runs(const AttentionArgs &a, int tile_, int units) : args(a), tile(tile_) {
    const int lane = threadIdx.x % 32;
    own_tiles = lane < args.requests ? look(lane) : 0;
    const int total = sum_over(args.requests, [&](int b) { return tiles(b); });
    // The shortest runs that are few enough: blocks finish together if the GPU is full of them. Every request may end a run before it is
    // full, so as many fewer are always enough.
    int low = max(1, ceil_div(total, units)), high = max(low, ceil_div(total, max(1, units - args.requests)));
    while (low < high) {
      set((low + high) / 2);
      if (sum_over(args.requests, [&](int b) { return runs(b); }) <= units) {
        high = run_tiles;
      } else {
        low = run_tiles + 1;
      }
    }
    // Shorter runs than kShortestRun positions cost more in adding up than they gain.
    set(max(low, kShortestRun / tile));
  }
  __device__ void set(int length) {
    run_tiles = length;
    reciprocal = __frcp_rn(static_cast<float>(length));
  }
  // The first position that request b's first token sees, down to a group of 8.
  __device__ int begin(const Query &query) const { return query.begin(0, args.window) & ~7; }
  __device__ int look(int b) const {
    const Query query(args, b);
    return query.count > 0 && query.count <= kDecodeTokens ? ceil_div(query.length - begin(query), tile) : 0;
  }
  // Of request b, asked for by lane b % 32.
  __device__ int tiles(int b) const { return b < 32 ? own_tiles : look(b); }
  // As ceil_div: exact, as tiles and run_tiles are below 2^20.
  __device__ int runs_of(int tiles) const { return static_cast<int>((static_cast<float>(tiles + run_tiles - 1) + 0.5f) * reciprocal); }
  __device__ int runs(int b) const { return runs_of(tiles(b)); }
};

// The most runs, a power of two, whose `fours` float4 are no more than `most` in all.
VOLTSERVE_BOTH constexpr int members_at_once(int fours, int most) {
  int members = kRadix;
  while (members > 1 && members * fours > most) members /= 2;
  return members;
}

}  // namespace voltserve
