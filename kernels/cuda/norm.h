// The arguments of RMS norm between two products, and how a batch is cut. Plain C++ without CUDA.
#pragma once

#include <cuda_fp16.h>

#include "ahead.h"
#include "all_reduce.h"

namespace voltserve {

constexpr int kNormThreads = 512;  // of a block at most, which has a row
constexpr int kNormNumbers = 8;    // that a thread reads at once where x is no ranks' sum; otherwise a line's
constexpr int kNormUnits = 5;      // of so many numbers, a thread at most
constexpr int kMaxHidden = 16384;

struct NormArgs {
  ReduceArgs reduce;     // x and y fp16 [rows, hidden]; ranks: below 2, x is the sum already and nothing else of it is used
  __half *residual;      // [rows, hidden], to which x is added; null: none
  const __half *weight;  // [hidden]
  int rows, hidden;
  float eps;
  Ahead ahead;  // what other blocks read
};

struct NormPlan {
  int units, threads;  // of a thread, of a row's block
};

// For `rows` rows of `hidden` numbers, and the ranks of an all-reduce or fewer than 2 for none. Throws std::invalid_argument naming
// what does not fit.
NormPlan plan_norm(int rows, int hidden, int ranks);

}  // namespace voltserve
