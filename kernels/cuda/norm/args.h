// The arguments of RMS norm between two products, and how a batch is cut. Plain C++ without CUDA.
#pragma once

#include <cuda_fp16.h>

#include "cuda/all_reduce/args.h"

namespace voltserve {

constexpr int kNormThreads = 512;  // of a block at most, which has a row
constexpr int kNormNumbers = 8;    // of a unit: what a thread reads at once
constexpr int kNormNumbersOfRanks = 2 * kLineHalves;  // likewise where ranks meet, as two lines
constexpr int kNormUnits = 4, kNormUnitsOfRanks = 3;  // of a thread at most
constexpr int kMaxHidden = 16384;

struct NormArgs {
  ReduceArgs reduce;     // x and y fp16 [rows, hidden]; ranks: below 2, x is the sum already and nothing else of it is used
  __half *residual;      // [rows, hidden], to which x is added; null: none
  const __half *weight;  // [hidden]
  int rows, hidden;
  float eps;
};

struct NormPlan {
  int units, threads;  // of a thread, of a row's block
};

// For `rows` rows of `hidden` numbers, and the ranks of an all-reduce or fewer than 2 for none. Throws std::invalid_argument naming
// what does not fit.
NormPlan plan_norm(int rows, int hidden, int ranks);

}  // namespace voltserve
