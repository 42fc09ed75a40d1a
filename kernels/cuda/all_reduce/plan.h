// How an all-reduce is sent, a pure function of its size and the ranks, the same on every rank. Plain C++ without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/layout.cuh"

namespace voltserve {

constexpr int kMaxRanks = 8;
constexpr int kReduceThreads = 256;
constexpr int kReduceBlocks = 64;  // of a launch at most, so that all are on a V100's 80 processors at once
constexpr int kReduceTurns = kReduceBlocks + 1;  // 4-byte words that a rank's GPU counts in, all 1 at first
constexpr size_t kLineBytes = 16;  // all_reduce.cuh
constexpr int kLineHalves = 7, kLineFloats = 3;  // numbers of a line
// 102 tokens of 5120 halves: more are a prompt's, which NCCL moves at the bus' rate, too.
constexpr size_t kMaxReduceData = 1 << 20;
// A rank's slot: two halves, for odd and even turns, with places for the lines of one call.
constexpr size_t kPlaces = (kMaxReduceData / 4 + kLineFloats - 1) / kLineFloats;
constexpr size_t kSlotHalf = kPlaces * kLineBytes;
constexpr size_t kSlotBytes = 2 * kSlotHalf;
// Turns are 1 .. kLastTurn, then 2 .., so that odd and even ones alternate. Each renews some places that its lines leave alone.
constexpr uint32_t kLastTurn = 65535;
constexpr int kRenewed = 8;

// The blocks of the grid for `count` of each rank's numbers, fp16 (`half`) or fp32: a thread a line as long as that is so. Throws
// std::invalid_argument naming what does not fit.
int plan_all_reduce(size_t count, bool half, int ranks);

}  // namespace voltserve
