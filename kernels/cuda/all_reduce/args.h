// The arguments of an all-reduce. Plain C++ without CUDA.
#pragma once

#include <cstdint>

#include "cuda/all_reduce/plan.h"

namespace voltserve {

struct ReduceArgs {
  const void *x;  // [count], 16-byte aligned
  void *y;        // [count], 16-byte aligned; no part of x
  int count;      // numbers
  int half;       // 1: numbers are fp16, 0: fp32
  int rank, ranks;
  int copies;                      // copies that this rank writes: to[0 .. copies - 1]
  unsigned char *to[kMaxRanks];    // the slots that it writes
  unsigned char *from[kMaxRanks];  // by rank, the slot that it reads; from[rank] is not used
  uint32_t *epochs;                // [kReduceEpochs] on this GPU, all 1 before the first call
  uint64_t limit_ns;               // the longest wait for one rank
  int *late;                       // null: a late rank stops this GPU; otherwise its number + 1 is written here, and y is wrong
};

}  // namespace voltserve
