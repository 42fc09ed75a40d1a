// Which kernel computes a linear layer: a pure function of the problem and the GPU. No environment variable, no probing and no clock
// takes part. Plain C++ without CUDA, so any machine can test and print it.
#pragma once

#include <cstddef>

namespace voltserve {

struct Problem {
  int m, n, k;     // y [m, n] = x [m, k] W^T
  int group;       // 16 or 32; FP8: 0 or 128 (common/layout8.cuh)
  int arch;        // compute capability, 70 for V100
  int processors;  // multiprocessors of the GPU
  int experts;     // 0: one matrix; otherwise a grouped call, whose m counts slots (tokens * top_k)
};

// The fused kernels, named after the tokens per block.
enum class Variant { mma2, mma4, mma8, mma16, mma32, mma64, mma128, count };

struct Shape {
  const char *name;
  int tokens, rows, threads, stage_tiles;  // per block; stage_tiles: tiles of 64 columns per stage
  int blocks_per_processor;                // that fit a V100, by registers and shared memory
};

enum class Path { fused, dequantize };

struct Plan {
  Path path;
  Variant variant;         // of the fused path
  int blocks;              // of the grid
  int tiles;               // of the output; blocks share them (linear.cuh)
  size_t workspace_words;  // all 0xFFFFFFFF before the first launch
  const char *reason;
};

const Shape &shape(Variant variant);

// Throws std::invalid_argument naming what does not fit.
Plan plan(const Problem &problem);

// The plan of a grouped call whose slots are already aligned to `block` slots, in at most `token_blocks` blocks.
Plan plan_grouped(const Problem &problem, int block, int token_blocks);

}  // namespace voltserve
