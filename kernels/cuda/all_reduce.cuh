// y = x_0 + x_1 + … + x_{R-1}, x_r being rank r's x: an all-reduce in one kernel, through memory that all ranks can read and write.
//
//   x, y   [count] fp16 or fp32, 16-byte aligned, at most 1 MiB (all_reduce_plan.h)
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
// two or more turns before, or zeros: a reader waits for t itself. (Numbers come again after 2^32 - 2 turns, a week of decoding. A
// place that nothing touched for exactly so long would be taken for new.) tests/kernels/test_all_reduce_protocol.py goes through
// all orders of the ranks' reads and writes.
//
// What is sent are lines of 16 bytes, 12 of data and the turn, each written and read by one access: since ld and st of .b128 with
// .relaxed are single operations of the memory model (PTX ISA 8.3, from sm_70 on), data that comes with the right turn is right. No
// fence, no separate flag: one write and one read over the bus is all that a line waits for. A thread sends all its lines before it
// looks for others'.
//
// Tried on two H200s and left out: chunks of 4 KiB with a fence and one flag each, which carry fewer bytes but wait 3 to 6 µs for a
// fence under load (docs/results/all-reduce-h200-chunks-2026-11-30.json: 27 µs where lines take 8); and warps that look for their
// last line before the others, lest looks that come too early fill the bus: one more way over it, and nothing gained.
//
// Bytes over a GPU's bus: sent 4/3 copies * B, received 4/3 (R - 1) B.
//
// A rank that is dead must not hold the others for ever: after limit_ns of waiting the kernel stops with an assertion that names
// the rank, which makes the next synchronization fail. Blocks wait for other GPUs' blocks only, which send before they wait, and
// all blocks of a launch fit a V100 at once.
#pragma once

#include <cuda_fp16.h>

#include <cassert>
#include <cstdint>

#include "all_reduce.h"

namespace voltserve {

// The moment when waiting began, and whether it has lasted too long. Time is read only once something is waited for.
struct Patience {
  uint64_t since = 0;

  __device__ bool over(const ReduceArgs &args) {
    if (args.late && *static_cast<volatile int *>(args.late)) return true;  // one limit for all that a launch waits for
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (since == 0) since = now;
    return now - since > args.limit_ns;
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
// with it, whatever the others do.
__device__ inline void report_late(const ReduceArgs &args, int rank) {
  if (args.late) {
    *static_cast<volatile int *>(args.late) = rank + 1;
  } else if (atomicExch(args.turns + kReduceBlocks, 0u) != 0) {
    __assert_fail(kLate[rank], __FILE__, __LINE__, __func__);
  }
}

// A line, as the whole machine sees it.
struct Line {
  uint32_t words[3], turn;
};

__device__ inline void put(void *to, const Line &line) {
  const uint64_t low = line.words[0] | static_cast<uint64_t>(line.words[1]) << 32;
  const uint64_t high = line.words[2] | static_cast<uint64_t>(line.turn) << 32;
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
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
          static_cast<uint32_t>(high >> 32)};
}

// The line at `from`, once `rank` has written this turn's.
__device__ inline Line take(const ReduceArgs &args, const void *from, uint32_t turn, int rank) {
  Patience patience;
  while (true) {
    const Line line = get(from);
    if (line.turn == turn) return line;
    if (!patience.over(args)) continue;
    report_late(args, rank);
    return line;
  }
}

// 4 bytes: two halves or one float.
template <class T>
struct Word {
  static constexpr int kNumbers = 4 / sizeof(T);
  float part[kNumbers];

  __device__ void add(uint32_t bits) {
    if constexpr (kNumbers == 2) {
      const float2 two = __half22float2(*reinterpret_cast<const half2 *>(&bits));
      part[0] += two.x;
      part[1] += two.y;
    } else {
      part[0] += __uint_as_float(bits);
    }
  }
  __device__ uint32_t bits() const {
    if constexpr (kNumbers == 2) {
      const half2 two = __floats2half2_rn(part[0], part[1]);
      return *reinterpret_cast<const uint32_t *>(&two);
    } else {
      return __float_as_uint(part[0]);
    }
  }
};

// The numbers of x[first], one line's, zeros beyond its end.
template <class T>
__device__ inline Line load(const ReduceArgs &args, int first, uint32_t turn) {
  Line line{{0, 0, 0}, turn};
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    const int at = first + w * Word<T>::kNumbers;
    const T *x = static_cast<const T *>(args.x) + at;
    if (at + Word<T>::kNumbers <= args.count) {
      line.words[w] = *reinterpret_cast<const uint32_t *>(x);
    } else if (at < args.count) {  // the last half of an odd number of them
      line.words[w] = *reinterpret_cast<const uint16_t *>(x);
    }
  }
  return line;
}

// The sums to y[first]; nothing beyond its end.
template <class T>
__device__ inline void store(const ReduceArgs &args, int first, const Word<T> (&sums)[3]) {
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    const int at = first + w * Word<T>::kNumbers;
    T *y = static_cast<T *>(args.y) + at;
    if (at + Word<T>::kNumbers <= args.count) {
      *reinterpret_cast<uint32_t *>(y) = sums[w].bits();
    } else if (at < args.count) {
      *reinterpret_cast<uint16_t *>(y) = static_cast<uint16_t>(sums[w].bits());
    }
  }
}

// Every block has a turn counter of its own, which only it reads and only one block of a launch writes: no block waits for another,
// and launches of any number of blocks follow each other.
__device__ inline void end_turn(const ReduceArgs &args, uint32_t turn) {
  __syncthreads();  // all threads have read it
  const uint32_t next = turn == ~0u ? 2 : turn + 1;  // odd and even still alternate; 0 is what memory holds at first
#pragma unroll 1
  for (int i = blockIdx.x + gridDim.x * threadIdx.x; i < kReduceBlocks; i += gridDim.x * kReduceThreads) args.turns[i] = next;
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_kernel(const ReduceArgs args) {
  constexpr int kNumbers = 3 * Word<T>::kNumbers;
  const uint32_t turn = args.turns[blockIdx.x];
  const size_t half = (turn & 1) * kSlotHalf;
  const int lines = (args.count + kNumbers - 1) / kNumbers, stride = gridDim.x * kReduceThreads;
  const int begin = blockIdx.x * kReduceThreads + threadIdx.x;

  for (int line = begin; line < lines; line += stride) {
    const Line own = load<T>(args, line * kNumbers, turn);
#pragma unroll 1
    for (int copy = 0; copy < args.copies; ++copy) put(args.to[copy] + half + line * kLineBytes, own);
  }
  for (int line = begin; line < lines; line += stride) {
    const size_t at = half + line * kLineBytes;
    const Line own = load<T>(args, line * kNumbers, turn);
    Word<T> sums[3] = {};
#pragma unroll 1
    for (int rank = 0; rank < args.ranks; ++rank) {
      const Line part = rank == args.rank ? own : take(args, args.from[rank] + at, turn, rank);
#pragma unroll
      for (int w = 0; w < 3; ++w) sums[w].add(part.words[w]);
    }
    store<T>(args, line * kNumbers, sums);
  }
  end_turn(args, turn);
}

}  // namespace voltserve
