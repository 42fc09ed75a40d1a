// An all-reduce in one kernel, through memory that all ranks can read and write:
//
//     y = x_0 + x_1 + ... + x_{R-1}        x_r is rank r's x
//
//   x, y   [count] fp16 or fp32, 16-byte aligned, at most 1 MiB (plan.h)
//   sum    in fp32, rank 0 first, rounded once: the same bits on every rank
//   ranks  2 to 8, each with a GPU and a process of its own
//
// One shot: a rank writes x to its slot and reads all others' slots. Slots lie in the host's pinned memory, for GPUs without
// peer-to-peer (one copy per rank). Otherwise they lie in the readers' own memory (one copy per reader).
//
// Lines. Data travels in lines of 16 bytes: 14 of data (7 halves, or 3 floats) and 2 with the epoch of the call:
//
//     byte   0         2         4        ...        12        14       16
//            | half 0  | half 1  | half 2 |   ...    | half 6  | epoch  |
//
// Each line is written and read by one access. ld and st of .b128 with .relaxed are single operations of the memory model (PTX ISA
// 8.3, from sm_70 on), so data that arrives with the right epoch is right. No fence and no separate flag is needed: a line costs
// one write and one read over the bus. A thread sends all its lines before it looks for others'.
//
// Epochs. Calls are numbered 1, 2, 3 ... on the GPU, so a replayed graph keeps counting. Odd and even epochs use different halves of
// a slot. Two halves suffice:
//   1. A rank writes epoch t + 2 over epoch t only after its own call t + 1 has ended (stream order).
//   2. That call ended only after every other rank's data of t + 1 had arrived.
//   3. A rank sends t + 1 only after it has read all of t.
// So nobody still needs epoch t. A position holds a line of epoch t, of an epoch at least two older, or zeros; a reader waits for t.
//
// Epoch numbers repeat after kLastEpoch - 1 calls, so no position may stay unwritten that long. Each call therefore also writes
// kRenewed positions beyond its own lines, and passes over all of them several times in that span.
// tests/kernels/cuda/all_reduce/test_protocol.py checks all orders of the ranks' reads and writes, and the ages of all positions.
//
// Tried on two H200s and left out:
//   - chunks of 4 KiB with one fence and one flag each. They carry fewer bytes but wait 3 to 6 us for the fence under load: 27 us where
//     lines take 8 (docs/results/all-reduce-h200-chunks-2026-11-30.json).
//   - warps that look for their last line first, lest early looks fill the bus. That is one more trip over it, and gained nothing.
//
// Bytes over a GPU's bus for B bytes of fp16: 8/7 * copies * B sent, 8/7 * (R - 1) * B received; for fp32 4/3 instead of 8/7.
//
// A dead rank must not hold the others for ever. After limit_ns of waiting the kernel ends with an assertion that names the rank, and
// the next synchronization fails. Blocks wait only for other GPUs' blocks, which send before they wait. All blocks of a launch fit
// a V100 at once. So waiting cannot deadlock.
#pragma once

#include <cuda_fp16.h>

#include <cassert>
#include <cstdint>

#include "cuda/all_reduce/args.h"

namespace voltserve {

// When a thread began to wait, and the rank on which it gave up. The clock is read only once something is missing.
struct Patience {
  uint64_t since = 0;
  int late = -1;

  __device__ bool over(const ReduceArgs &args, int rank) {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (since == 0) since = now;
    if (now - since <= args.limit_ns) return false;
    late = rank;
    return true;
  }
};

__device__ const char kLate[kMaxRanks][64] = {
    "all-reduce: rank 0 did not answer within the time limit", "all-reduce: rank 1 did not answer within the time limit",
    "all-reduce: rank 2 did not answer within the time limit", "all-reduce: rank 3 did not answer within the time limit",
    "all-reduce: rank 4 did not answer within the time limit", "all-reduce: rank 5 did not answer within the time limit",
    "all-reduce: rank 6 did not answer within the time limit", "all-reduce: rank 7 did not answer within the time limit",
};

// An assertion's text reaches the host although the kernel ends there; printf's would not. One thread reports, and the kernel has
// failed with it, whatever the others do. It is called at a kernel's end, where no registers need saving.
__device__ inline void report_late(const ReduceArgs &args, int rank) {
  if (args.late) {
    *static_cast<volatile int *>(args.late) = rank + 1;
  } else if (atomicExch(args.epochs + kReduceBlocks, 0u) != 0) {
    __assert_fail(kLate[rank], __FILE__, __LINE__, __func__);
  }
}

// A line: 7 halves or 3 floats, and the epoch in the upper half of words[3].
struct Line {
  uint32_t words[4];

  __device__ uint32_t epoch() const { return words[3] >> 16; }
};

// One store or load that the whole system sees as one access.
__device__ inline void put(void *to, const Line &line, uint32_t epoch) {
  const uint64_t low = line.words[0] | static_cast<uint64_t>(line.words[1]) << 32;
  const uint64_t high = line.words[2] | static_cast<uint64_t>((line.words[3] & 0xFFFF) | epoch << 16) << 32;
  asm volatile("{\n\t.reg .b128 line;\n\tmov.b128 line, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], line;\n\t}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}

__device__ inline Line get(const void *from) {
  uint64_t low, high;
  asm volatile("{\n\t.reg .b128 line;\n\tld.relaxed.sys.global.b128 line, [%2];\n\tmov.b128 {%0, %1}, line;\n\t}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}

// Reads lines of `rank` at `places` of its slot's half, and returns once all are of this epoch. Lines at places below 0 are zeros.
// All missing lines are requested at once rather than one after another, since each read is a trip over the bus.
template <int kLines>
__device__ inline void receive(const ReduceArgs &args, uint32_t epoch, int rank, const int (&places)[kLines], Line (&lines)[kLines],
                               Patience &patience) {
  const unsigned char *const from = args.from[rank] + (epoch & 1) * kSlotHalf;
#pragma unroll
  for (int i = 0; i < kLines; ++i) lines[i] = {{0, 0, 0, places[i] < 0 ? epoch << 16 : 0}};
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (lines[i].epoch() != epoch) lines[i] = get(from + places[i] * kLineBytes);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) missing |= lines[i].epoch() != epoch;
  } while (missing && !patience.over(args, rank));
}

// Running sums of a line's numbers.
template <class T>
struct Sums;

template <>
struct Sums<__half> {
  static constexpr int kNumbers = kLineHalves;
  float2 pairs[4] = {};  // the last number is unused

  __device__ void add(const Line &line) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 two = __half22float2(*reinterpret_cast<const half2 *>(&line.words[w]));
      pairs[w].x += two.x;
      if (w < 3) pairs[w].y += two.y;
    }
  }
  __device__ Line rounded() const {
    Line line;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const half2 two = __floats2half2_rn(pairs[w].x, pairs[w].y);
      line.words[w] = *reinterpret_cast<const uint32_t *>(&two);
    }
    return line;
  }
};

template <>
struct Sums<float> {
  static constexpr int kNumbers = kLineFloats;
  float numbers[3] = {};

  __device__ void add(const Line &line) {
#pragma unroll
    for (int w = 0; w < 3; ++w) numbers[w] += __uint_as_float(line.words[w]);
  }
  __device__ Line rounded() const {
    return {{__float_as_uint(numbers[0]), __float_as_uint(numbers[1]), __float_as_uint(numbers[2]), 0}};
  }
};

// Writes this rank's line to its place in every copy.
__device__ inline void send(const ReduceArgs &args, uint32_t epoch, int place, const Line &line) {
#pragma unroll 1
  for (int copy = 0; copy < args.copies; ++copy) put(args.to[copy] + (epoch & 1) * kSlotHalf + place * kLineBytes, line, epoch);
}

// The line of x [count] that starts at number `first`, a multiple of a line's numbers. Past the end are zeros.
__device__ inline Line load(const float *x, int first, int count) {
  Line line{};
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    if (first + w < count) line.words[w] = __float_as_uint(x[first + w]);
  }
  return line;
}

// For the last number of an odd count the whole word is read. It lies within x's last 16 bytes, and its other half is never stored.
__device__ inline Line load(const __half *x, int first, int count) {
  const bool odd = first & 1;
  const uint32_t *const words = reinterpret_cast<const uint32_t *>(x) + first / 2;
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = first / 2 + i < (count + 1) / 2 ? words[i] : 0;
  Line line;
#pragma unroll
  for (int i = 0; i < 3; ++i) line.words[i] = odd ? __funnelshift_r(w[i], w[i + 1], 16) : w[i];
  line.words[3] = odd ? w[3] >> 16 : w[3] & 0xFFFF;
  return line;
}

// Writes a line's numbers to y [count] from number `first` on, and nothing past the end.
__device__ inline void store(float *y, int first, int count, const Line &line) {
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    if (first + w < count) y[first + w] = __uint_as_float(line.words[w]);
  }
}

__device__ inline void store(__half *y, int first, int count, const Line &line) {
  auto *const numbers = reinterpret_cast<uint16_t *>(y) + first;
#pragma unroll
  for (int i = 0; i < kLineHalves; ++i) {
    if (first + i < count) numbers[i] = static_cast<uint16_t>(line.words[i / 2] >> i % 2 * 16);
  }
}

// Writes kRenewed places past this call's own `lines`, so that no place keeps an old epoch until its number returns.
__device__ inline void renew(const ReduceArgs &args, uint32_t epoch, int lines) {
  if (threadIdx.x >= kRenewed) return;
  const int place = ((epoch >> 1) * kRenewed + threadIdx.x) % kPlaces;
  if (place >= lines) send(args, epoch, place, {});
}

// Advances the epoch. Every block has its own counter, which only it reads and only one block of a launch writes. So no block waits
// for another, and launches of different numbers of blocks may follow each other. `blocks`: the blocks of this launch.
__device__ inline void end_epoch(const ReduceArgs &args, uint32_t epoch, int blocks, const Patience &patience) {
  __syncthreads();  // all threads have read the epoch
  const uint32_t next = epoch == kLastEpoch ? 2 : epoch + 1;
#pragma unroll 1
  for (int i = blockIdx.x + blocks * threadIdx.x; i < kReduceBlocks; i += blocks * blockDim.x) args.epochs[i] = next;
  if (patience.late >= 0) report_late(args, patience.late);
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_kernel(const ReduceArgs args) {
  constexpr int kNumbers = Sums<T>::kNumbers, kLines = 2;
  const uint32_t epoch = args.epochs[blockIdx.x];
  const int lines = (args.count + kNumbers - 1) / kNumbers, stride = gridDim.x * kReduceThreads;
  const int begin = blockIdx.x * kReduceThreads + threadIdx.x;
  const T *const x = static_cast<const T *>(args.x);
  Patience patience;

#pragma unroll 1
  for (int line = begin; line < lines; line += stride) send(args, epoch, line, load(x, line * kNumbers, args.count));
  if (blockIdx.x == 0) renew(args, epoch, lines);
#pragma unroll 1
  for (int first = begin; first < lines; first += kLines * stride) {
    int places[kLines];
    Sums<T> sums[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) places[i] = first + i * stride < lines ? first + i * stride : -1;
#pragma unroll 1
    for (int rank = 0; rank < args.ranks; ++rank) {
      Line parts[kLines];
      if (rank == args.rank) {
#pragma unroll
        for (int i = 0; i < kLines; ++i) parts[i] = load(x, (first + i * stride) * kNumbers, args.count);
      } else {
        receive(args, epoch, rank, places, parts, patience);
      }
#pragma unroll
      for (int i = 0; i < kLines; ++i) sums[i].add(parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (places[i] >= 0) store(static_cast<T *>(args.y), places[i] * kNumbers, args.count, sums[i].rounded());
    }
  }
  end_epoch(args, epoch, gridDim.x, patience);
}

}  // namespace voltserve
