// y = x_0 + x_1 + … + x_{R-1}, x_r being rank r's x: an all-reduce in one kernel, through memory that all ranks can read and write.
//
//   x, y   [count] fp16 or fp32, 16-byte aligned, at most 1 MiB (plan.h)
//   sum    in fp32, rank 0 first, rounded once: the same bits on every rank
//   ranks  2 to 8, each with a GPU and a process of its own
//
// One shot: a rank writes x to its slot and reads all others' slots. The slots lie in the host's pinned memory, where GPUs without
// peer-to-peer meet (every rank has one copy to write), or in the readers' own memory (one copy a reader).
//
// A call is a `turn`: 1, 2, 3 …, counted on the GPU, so that a captured graph counts on. Turns alternate between the slot's two
// halves. Data of turn t is never overwritten before all have read it: its place is written again in turn t + 2, which a rank
// starts when its turn t + 1 has ended (stream order), thus when it has got every other rank's data of t + 1; a rank sends those
// after it has read all of turn t. So no rank is two turns ahead, and two halves are enough. A place holds a line of turn t, of one
// two or more turns before, or zeros: a reader waits for t itself. Numbers come again after kLastTurn - 1 turns, so a place must not
// lie untouched for so long: each turn also writes kRenewed places that its own lines do not, and comes round all of them several
// times before. tests/kernels/test_all_reduce_protocol.py goes through all orders of the ranks' reads and writes, and through the
// ages of all places.
//
// What is sent are lines of 16 bytes, 14 of data (7 halves, or 3 floats) and the turn, each written and read by one access: since
// ld and st of .b128 with .relaxed are single operations of the memory model (PTX ISA 8.3, from sm_70 on), data that comes with the
// right turn is right. No fence, no separate flag: one write and one read over the bus is all that a line waits for. A thread sends
// all its lines before it looks for others'.
//
// Tried on two H200s and left out: chunks of 4 KiB with a fence and one flag each, which carry fewer bytes but wait 3 to 6 µs for a
// fence under load (docs/results/all-reduce-h200-chunks-2026-11-30.json: 27 µs where lines take 8); and warps that look for their
// last line before the others, lest looks that come too early fill the bus: one more way over it, and nothing gained.
//
// Bytes over a GPU's bus: sent 8/7 copies * B, received 8/7 (R - 1) B; 4/3 of fp32.
//
// A rank that is dead must not hold the others for ever: after limit_ns of waiting the kernel ends with an assertion that names
// the rank, which makes the next synchronization fail. Blocks wait for other GPUs' blocks only, which send before they wait, and
// all blocks of a launch fit a V100 at once.
#pragma once

#include <cuda_fp16.h>

#include <cassert>
#include <cstdint>

#include "cuda/all_reduce/args.h"

namespace voltserve {

// The moment when a thread began to wait, and the rank that it gave up. Time is read only once something is waited for.
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
    "all-reduce: rank 0 did not answer within the time limit",
    "all-reduce: rank 1 did not answer within the time limit",
    "all-reduce: rank 2 did not answer within the time limit",
    "all-reduce: rank 3 did not answer within the time limit",
    "all-reduce: rank 4 did not answer within the time limit",
    "all-reduce: rank 5 did not answer within the time limit",
    "all-reduce: rank 6 did not answer within the time limit",
    "all-reduce: rank 7 did not answer within the time limit",
};

// An assertion's text is told even though the kernel ends there; what printf wrote is not. One thread tells; the kernel has failed
// with it, whatever the others do. At a kernel's end, where a call finds no registers that it would have to save.
__device__ inline void report_late(const ReduceArgs &args, int rank) {
  if (args.late) {
    *static_cast<volatile int *>(args.late) = rank + 1;
  } else if (atomicExch(args.turns + kReduceBlocks, 0u) != 0) {
    __assert_fail(kLate[rank], __FILE__, __LINE__, __func__);
  }
}

// A line: 7 halves or 3 floats, then in the upper half of words[3] the turn.
struct Line {
  uint32_t words[4];

  __device__ uint32_t turn() const { return words[3] >> 16; }
};

// As the whole machine sees it.
__device__ inline void put(void *to, const Line &line, uint32_t turn) {
  const uint64_t low = line.words[0] | static_cast<uint64_t>(line.words[1]) << 32;
  const uint64_t high = line.words[2] | static_cast<uint64_t>((line.words[3] & 0xFFFF) | turn << 16) << 32;
  asm volatile(
      "{\n\t.reg .b128 line;\n\tmov.b128 line, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], line;\n\t}" ::"l"(to), "l"(low), "l"(high)
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

// Lines of `rank` at places of its slot's half, once all of them are this turn's; those at places below 0 are zeros. Whatever is missing
// is looked for at once, not one after the other: each look is a way over the bus.
template <int kLines>
__device__ inline void receive(const ReduceArgs &args, uint32_t turn, int rank, const int (&places)[kLines], Line (&lines)[kLines],
                               Patience &patience) {
  const unsigned char *const from = args.from[rank] + (turn & 1) * kSlotHalf;
#pragma unroll
  for (int i = 0; i < kLines; ++i) lines[i] = {{0, 0, 0, places[i] < 0 ? turn << 16 : 0}};
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (lines[i].turn() != turn) lines[i] = get(from + places[i] * kLineBytes);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) missing |= lines[i].turn() != turn;
  } while (missing && !patience.over(args, rank));
}

// Sums of a line's numbers.
template <class T>
struct Sums;

template <>
struct Sums<__half> {
  static constexpr int kNumbers = kLineHalves;
  float2 pairs[4] = {};  // the last number is nothing

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

// This rank's line to its place, for all to read.
__device__ inline void send(const ReduceArgs &args, uint32_t turn, int place, const Line &line) {
#pragma unroll 1
  for (int copy = 0; copy < args.copies; ++copy) put(args.to[copy] + (turn & 1) * kSlotHalf + place * kLineBytes, line, turn);
}

// The numbers of x [count], 16-byte aligned, from `first` on, a multiple of a line's; zeros beyond the end.
__device__ inline Line load(const float *x, int first, int count) {
  Line line{};
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    if (first + w < count) line.words[w] = __float_as_uint(x[first + w]);
  }
  return line;
}

// Of the last number of an odd count the word is read, which lies within its 16 bytes; what comes with it is never stored.
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

// A line's numbers to y [count] from `first` on; nothing beyond its end.
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

// Writes some places beyond a turn's own `lines`, by all threads of one block.
__device__ inline void renew(const ReduceArgs &args, uint32_t turn, int lines) {
  if (threadIdx.x >= kRenewed) return;
  const int place = ((turn >> 1) * kRenewed + threadIdx.x) % kPlaces;
  if (place >= lines) send(args, turn, place, {});
}

// Every block has a turn counter of its own, which only it reads and only one block of a launch writes: no block waits for another,
// and launches of any number of blocks follow each other. `blocks`: those of the launch that count.
__device__ inline void end_turn(const ReduceArgs &args, uint32_t turn, int blocks, const Patience &patience) {
  __syncthreads();  // all threads have read it
  const uint32_t next = turn == kLastTurn ? 2 : turn + 1;
#pragma unroll 1
  for (int i = blockIdx.x + blocks * threadIdx.x; i < kReduceBlocks; i += blocks * blockDim.x) args.turns[i] = next;
  if (patience.late >= 0) report_late(args, patience.late);
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_kernel(const ReduceArgs args) {
  constexpr int kNumbers = Sums<T>::kNumbers, kLines = 2;
  const uint32_t turn = args.turns[blockIdx.x];
  const int lines = (args.count + kNumbers - 1) / kNumbers, stride = gridDim.x * kReduceThreads;
  const int begin = blockIdx.x * kReduceThreads + threadIdx.x;
  const T *const x = static_cast<const T *>(args.x);
  Patience patience;

#pragma unroll 1
  for (int line = begin; line < lines; line += stride) send(args, turn, line, load(x, line * kNumbers, args.count));
  if (blockIdx.x == 0) renew(args, turn, lines);
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
        receive(args, turn, rank, places, parts, patience);
      }
#pragma unroll
      for (int i = 0; i < kLines; ++i) sums[i].add(parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (places[i] >= 0) store(static_cast<T *>(args.y), places[i] * kNumbers, args.count, sums[i].rounded());
    }
  }
  end_turn(args, turn, gridDim.x, patience);
}

}  // namespace voltserve
