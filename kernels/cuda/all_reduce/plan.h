// How an all-reduce is sent: a pure function of its size and the ranks, the same on every rank. Plain C++ without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/layout.cuh"

namespace voltserve {

constexpr int kMaxRanks = 8;
constexpr int kReduceThreads = 256;
constexpr int kReduceBlocks = 64;                 // the most of a launch, so that all are resident on a V100's 80 multiprocessors
constexpr int kReduceEpochs = kReduceBlocks + 1;  // 4-byte words of epoch counters on a rank's GPU, all 1 at first
constexpr size_t kLineBytes = 16;                 // all_reduce.cuh
constexpr int kLineHalves = 7, kLineFloats = 3;   // numbers per line
// 102 tokens of 5120 halves. Larger sums belong to prompts, and NCCL moves those at the bus's rate too.
constexpr size_t kMaxReduceData = 1 << 20;
// A rank's slot has two halves, for odd and even epochs, each with places for the lines of one call.
constexpr size_t kPlaces = (kMaxReduceData / 4 + kLineFloats - 1) / kLineFloats;
constexpr size_t kSlotHalf = kPlaces * kLineBytes;
constexpr size_t kSlotBytes = 2 * kSlotHalf;
// Epochs are 1 .. kLastEpoch, then 2 .., so that odd and even ones alternate. Each renews kRenewed places past its own lines.
constexpr uint32_t kLastEpoch = 65535;
constexpr int kRenewed = 8;

// The blocks of the grid for `count` numbers of fp16 (`half`) or fp32 per rank: one thread per line as far as kReduceBlocks allow.
// Throws std::invalid_argument naming what does not fit.
int plan_all_reduce(size_t count, bool half, int ranks);

}  // namespace voltserve
