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
// after it has read all of turn t. So no rank is two turns ahead, and two halves are enough. A place holds a flag of turn t, of one
// two or more turns before, or 0: a reader waits for t itself. (Numbers come again after 2^32 - 2 turns, a week of decoding. A place
// that nothing touched for exactly so long would be taken for new.) tests/kernels/test_all_reduce_protocol.py goes through
// all orders of two ranks' reads and writes.
//
//   lines   16 bytes: two times 4 bytes of data and the turn. 8 bytes arrive whole, so data needs no fence and no flag of its own: one
//           write and one read over the bus is all. A thread has one line. Twice the bytes.
//   chunks  4 KiB of data, a fence, then the flag. Half of the blocks send, half receive, so that both directions of the bus are
//           busy. 16 senders keep up to 64 KiB on the way: PCIe 3's 12 GB/s times a fence's 2 µs are 24 KB.
//
// Bytes over a GPU's bus: sent copies * B, received (R - 1) B; with lines twice that.
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

// An assertion's text is told even though the kernel ends there; what printf wrote is not. One thread tells; the kernel has failed
// with it, whatever the others do.
__device__ inline void report_late(const ReduceArgs &args, int rank) {
  if (args.late) {
    *static_cast<volatile int *>(args.late) = rank + 1;
    return;
  }
  if (atomicExch(args.turns + kReduceBlocks, 0u) == 0) return;
#define VOLTSERVE_LATE(R) assert(rank != R && "all-reduce: rank " #R " did not answer within the time limit")
  VOLTSERVE_LATE(0);
  VOLTSERVE_LATE(1);
  VOLTSERVE_LATE(2);
  VOLTSERVE_LATE(3);
  VOLTSERVE_LATE(4);
  VOLTSERVE_LATE(5);
  VOLTSERVE_LATE(6);
  VOLTSERVE_LATE(7);
#undef VOLTSERVE_LATE
}

// Reads and writes that the whole machine sees, 8 bytes of them whole.
__device__ inline void put(void *to, const ulonglong2 &value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(value.x), "l"(value.y) : "memory");
}
__device__ inline ulonglong2 get(const void *from) {
  ulonglong2 value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(from) : "memory");
  return value;
}
__device__ inline void put_flag(void *to, uint32_t turn) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(turn) : "memory");
}
__device__ inline uint32_t get_flag(const void *from) {
  uint32_t turn;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(turn) : "l"(from) : "memory");
  return turn;
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

// WORDS words from x[first], zeros beyond its end.
template <class T, int WORDS>
__device__ inline void load(const ReduceArgs &args, int first, uint32_t (&words)[WORDS]) {
  constexpr int kNumbers = WORDS * Word<T>::kNumbers;
  const T *x = static_cast<const T *>(args.x) + first;
  if (first + kNumbers <= args.count) {
    if constexpr (WORDS == 2) {
      const uint2 all = *reinterpret_cast<const uint2 *>(x);
      words[0] = all.x, words[1] = all.y;
    } else {
      const uint4 all = *reinterpret_cast<const uint4 *>(x);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
    return;
  }
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    words[w] = 0;
#pragma unroll
    for (int i = 0; i < Word<T>::kNumbers; ++i) {
      const int at = w * Word<T>::kNumbers + i;
      if (first + at >= args.count) continue;
      if constexpr (sizeof(T) == 2) {
        words[w] |= static_cast<uint32_t>(__half_as_ushort(x[at])) << 16 * i;
      } else {
        words[w] = __float_as_uint(x[at]);
      }
    }
  }
}

// The sums to y[first]; nothing beyond its end.
template <class T, int WORDS>
__device__ inline void store(const ReduceArgs &args, int first, const Word<T> (&sums)[WORDS]) {
  constexpr int kNumbers = WORDS * Word<T>::kNumbers;
  T *y = static_cast<T *>(args.y) + first;
  if (first + kNumbers <= args.count) {
    if constexpr (WORDS == 2) {
      *reinterpret_cast<uint2 *>(y) = make_uint2(sums[0].bits(), sums[1].bits());
    } else {
      *reinterpret_cast<uint4 *>(y) = make_uint4(sums[0].bits(), sums[1].bits(), sums[2].bits(), sums[3].bits());
    }
    return;
  }
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
#pragma unroll
    for (int i = 0; i < Word<T>::kNumbers; ++i) {
      const int at = w * Word<T>::kNumbers + i;
      if (first + at < args.count) y[at] = static_cast<T>(sums[w].part[i]);
    }
  }
}

// Every block has a turn counter of its own, which only it reads and only one block of a launch writes: no block waits for another,
// and launches of any number of blocks follow each other.
__device__ inline void end_turn(const ReduceArgs &args, uint32_t turn) {
  __syncthreads();  // all threads have read it
  const uint32_t next = turn == ~0u ? 2 : turn + 1;  // odd and even still alternate; 0 is what memory holds at first
  for (int i = blockIdx.x + gridDim.x * threadIdx.x; i < kReduceBlocks; i += gridDim.x * kReduceThreads) args.turns[i] = next;
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_lines_kernel(const ReduceArgs args) {
  constexpr int kWords = 2;
  const uint32_t turn = args.turns[blockIdx.x];
  const int line = blockIdx.x * kReduceThreads + threadIdx.x, first = line * kWords * Word<T>::kNumbers;
  const size_t at = (turn & 1) * kSlotHalf + line * kLineBytes;
  if (first < args.count) {
    uint32_t own[kWords];
    load<T>(args, first, own);
    const uint64_t flag = static_cast<uint64_t>(turn) << 32;
    for (int copy = 0; copy < args.copies; ++copy) put(args.to[copy] + at, make_ulonglong2(flag | own[0], flag | own[1]));

    Word<T> sums[kWords] = {};
    for (int rank = 0; rank < args.ranks; ++rank) {
      ulonglong2 got = make_ulonglong2(own[0], own[1]);
      if (rank != args.rank) {
        Patience patience;
        do {
          got = get(args.from[rank] + at);
          if ((got.x ^ flag) >> 32 == 0 && (got.y ^ flag) >> 32 == 0) break;
          if (!patience.over(args)) continue;
          report_late(args, rank);
          break;
        } while (true);
      }
      sums[0].add(static_cast<uint32_t>(got.x));
      sums[1].add(static_cast<uint32_t>(got.y));
    }
    store<T>(args, first, sums);
  }
  end_turn(args, turn);
}

template <class T>
__global__ void __launch_bounds__(kReduceThreads) all_reduce_chunks_kernel(const ReduceArgs args) {
  constexpr int kWords = 4, kNumbers = kWords * Word<T>::kNumbers;
  const uint32_t turn = args.turns[blockIdx.x];
  const size_t half = (turn & 1) * kSlotHalf;
  const int workers = gridDim.x / 2, worker = blockIdx.x % workers;
  const int chunk_numbers = kNumbers * kReduceThreads, chunks = (args.count + chunk_numbers - 1) / chunk_numbers;
  const bool sends = blockIdx.x < workers;
  for (int chunk = worker; chunk < chunks; chunk += workers) {
    const int first = chunk * chunk_numbers + threadIdx.x * kNumbers;
    const size_t flag_at = half + kSlotLines + chunk * sizeof(uint32_t);
    const size_t data_at = half + kSlotLines + kSlotFlags + chunk * kChunkData + threadIdx.x * 16;
    uint32_t own[kWords] = {};
    if (first < args.count) load<T>(args, first, own);
    if (sends) {
      if (first < args.count) {
        const auto pair = [&](int w) { return own[w] | static_cast<uint64_t>(own[w + 1]) << 32; };
        for (int copy = 0; copy < args.copies; ++copy) put(args.to[copy] + data_at, make_ulonglong2(pair(0), pair(2)));
      }
      __syncthreads();  // the chunk's writes come before one thread's release
      // A loop, since ptxas would have every thread wait at the fence of a single predicated store.
#pragma unroll 1
      for (int copy = threadIdx.x; copy < args.copies; copy += kReduceThreads) put_flag(args.to[copy] + flag_at, turn);
      continue;
    }
    if (threadIdx.x < args.ranks && threadIdx.x != args.rank) {
      Patience patience;
      while (get_flag(args.from[threadIdx.x] + flag_at) != turn) {
        if (!patience.over(args)) continue;
        report_late(args, threadIdx.x);
        break;
      }
    }
    __syncthreads();
    if (first >= args.count) continue;
    Word<T> sums[kWords] = {};
    for (int rank = 0; rank < args.ranks; ++rank) {
      uint32_t words[kWords] = {own[0], own[1], own[2], own[3]};
      if (rank != args.rank) {
        const ulonglong2 got = get(args.from[rank] + data_at);
        words[0] = static_cast<uint32_t>(got.x), words[1] = got.x >> 32;
        words[2] = static_cast<uint32_t>(got.y), words[3] = got.y >> 32;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) sums[w].add(words[w]);
    }
    store<T>(args, first, sums);
  }
  end_turn(args, turn);
}

}  // namespace voltserve
