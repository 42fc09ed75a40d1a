// How an all-reduce is sent, a pure function of its size and the number of ranks, the same on every rank. Plain C++ without CUDA.
#pragma once

#include <cstddef>

#include "layout.cuh"

namespace voltserve {

constexpr int kMaxRanks = 8;
constexpr int kReduceThreads = 256;
constexpr int kReduceBlocks = 32;  // of a launch at most, so that all are on a V100's 80 processors at once
constexpr int kReduceTurns = kReduceBlocks + 1;  // 4-byte words that a rank's GPU counts in, all 1 at first
constexpr size_t kLineBytes = 16, kLineData = 8;  // all_reduce.cuh
constexpr size_t kChunkData = 16 * kReduceThreads;
// Lines cost twice the bytes, chunks a fence and one more way over the bus. On PCIe 3 (scripts/v100_table.py's model) both take the
// same time at about 40 KiB.
constexpr size_t kMaxLineData = 40 << 10;
// 102 tokens of 5120 numbers: more are a prompt's, which NCCL moves at the bus' rate, too.
constexpr size_t kMaxReduceData = 1 << 20;

// A rank's slot: two halves, for odd and even turns; in each the lines, the chunks' flags, the chunks.
constexpr size_t kSlotLines = kReduceBlocks * kReduceThreads * kLineBytes;
static_assert(kMaxLineData / kLineData * kLineBytes <= kSlotLines, "a thread sends one line");
constexpr size_t kSlotFlags = kMaxReduceData / kChunkData * sizeof(unsigned);
constexpr size_t kSlotHalf = kSlotLines + kSlotFlags + kMaxReduceData;
constexpr size_t kSlotBytes = 2 * kSlotHalf;

enum class Protocol { lines, chunks };

struct ReducePlan {
  Protocol protocol;
  int blocks;  // of the grid; with chunks the first half sends, the second receives
  const char *reason;
};

// `bytes`: of one rank's numbers. Throws std::invalid_argument naming what does not fit.
ReducePlan plan_all_reduce(size_t bytes, int ranks);

}  // namespace voltserve
