// The arguments of RMS norm between two products, and how a batch is cut. Plain C++ without CUDA.
#pragma once

#include <cuda_fp16.h>

#include "cuda/all_reduce/args.h"

namespace voltserve {

constexpr int kNormThreads = 512;                         // the most of a block, which has one row
constexpr int kNormNumbers = 8;                           // per vector: what a thread reads at once
constexpr int kNormNumbersOfRanks = 2 * kLineHalves;      // the same where ranks meet, as two lines
constexpr int kNormVectors = 4, kNormVectorsOfRanks = 3;  // the most per thread
constexpr int kMaxHidden = 16384;

struct NormArgs {
  ReduceArgs reduce;     // x and y fp16 [rows, hidden]; with fewer than 2 ranks x is the sum, and only x and y are used
  __half *residual;      // [rows, hidden], to which x is added; null: none
  const __half *weight;  // [hidden]
  int rows, hidden;
  float eps;
};

struct NormPlan {
  int vectors, threads;  // vectors per thread, threads per row
};

// For `rows` rows of `hidden` numbers; fewer than 2 `ranks` mean no all-reduce. Throws std::invalid_argument naming what does not fit.
NormPlan plan_norm(int rows, int hidden, int ranks);

}  // namespace voltserve
