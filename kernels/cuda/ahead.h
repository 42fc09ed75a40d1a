// Reading ahead: while a kernel between two products waits for other ranks, blocks of it that have nothing to do read what the next
// product reads first, so that the memory bus is not idle in between and the product finds those weights in the L2.
//
// Kernels that wait for nobody do not: on an H200 one of 2 us grew by more than its product shrank, by 1.0-2.0 us a pair at M = 1
// with 6 MB and more with more (docs/results/read-ahead-h200-2026-11-30.json).
//
// A product's blocks all start at once, each with a run of its own (linear.cuh). So what is read ahead is the first stages of every
// block's run, in the order in which the block comes to them; a contiguous piece of the weights would help some blocks
// only, and the product ends with its slowest. Nothing depends on it but time.
//
// Plain C++, so that bindings and tests can include it; the device's side is ahead.cuh.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.cuh"
#include "plan.h"

namespace voltserve {

// A stage of a block, as every fused kernel for few tokens has it (plan.cpp): tiles of 32 rows by 64 columns.
constexpr int kAheadRowTiles = 2, kAheadColumnTiles = 4;
// Above it products are bound by their arithmetic.
constexpr int kAheadTokens = 32;

// What is read of the next product's weights; an argument of the kernel that reads. All zeros: nothing.
struct Ahead {
  const unsigned char *codes, *scales;  // packed (layout.cuh)
  int blocks, depth;                    // of the product's grid; stages of each block's run
  int share, extra, stages;             // of the grid's runs, and of a tile: linear.cuh's Work
  int tile_rows, column_tiles;          // tiles along N and K
  int scale_bytes;                      // of a row of a tile
};

// The bytes that are worth reading ahead of a kernel in which `ranks` meet: about what memory gives while they do, and what the L2
// keeps beside all else. `arch`: compute capability, 70 for V100 (6 MB of L2, 0.88 TB/s), 90 for H200 (50 MB, 4.6 TB/s).
inline size_t ahead_bytes(int arch, int ranks) { return ranks < 2 ? 0 : arch < 80 ? 4 << 20 : 6 << 20; }

// The first stages of every block of `next`, about `bytes` in all: whole stages, so nothing where that is less than half of one.
// Nothing, too, where `next` is not a fused product of at most kAheadTokens tokens. Throws as plan() does.
Ahead read_ahead(const Problem &next, const void *codes, const void *scales, size_t bytes);

// Blocks of `threads` that read it with one stage of one block a warp.
inline int ahead_parts(const Ahead &ahead, int threads) { return ceil_div(ahead.blocks * ahead.depth, threads / 32); }

// The number of the stage, counted through all tiles, that `block` comes to after `before` others; -1 where its run is shorter.
VOLTSERVE_BOTH inline int stage_ahead(const Ahead &ahead, int block, int before) {
  const int first = block * ahead.share + (block < ahead.extra ? block : ahead.extra);
  int end = first + ahead.share + (block < ahead.extra);
  while (end > first) {  // its last tile first, and forwards in each
    const int tile_begin = (end - 1) / ahead.stages * ahead.stages, begin = tile_begin > first ? tile_begin : first;
    if (before < end - begin) return begin + before;
    before -= end - begin;
    end = begin;
  }
  return -1;
}

}  // namespace voltserve
