// How an all-reduce is sent, a pure function of its size and the ranks, the same on every rank. Plain C++ without CUDA.
#pragma once

#include <cstddef>

#include "layout.cuh"

namespace voltserve {

constexpr int kMaxRanks = 8;
constexpr int kReduceThreads = 256;
constexpr int kReduceBlocks = 64;  // of a launch at most, so that all are on a V100's 80 processors at once
constexpr int kReduceTurns = kReduceBlocks + 1;  // 4-byte words that a rank's GPU counts in, all 1 at first
constexpr size_t kLineBytes = 16, kLineData = 12;  // all_reduce.cuh
// 102 tokens of 5120 halves: more are a prompt's, which NCCL moves at the bus' rate, too.
constexpr size_t kMaxReduceData = 1 << 20;
// A rank's slot: two halves, for odd and even turns.
constexpr size_t kSlotHalf = (kMaxReduceData + kLineData - 1) / kLineData * kLineBytes;
constexpr size_t kSlotBytes = 2 * kSlotHalf;

// The blocks of the grid for `bytes` of each rank's numbers: a thread a line as long as that is so. Throws std::invalid_argument
// naming what does not fit.
int plan_all_reduce(size_t bytes, int ranks);

}  // namespace voltserve
