// What lies between one product and the next along the residual stream, as one kernel:
//
//     x = x_0 + x_1 + … + x_{R-1}    an all-reduce of the ranks' x (all_reduce/all_reduce.cuh), or x itself
//     residual += x
//     y = residual / sqrt(mean(residual^2) + eps) * weight
//
//   x, residual, y [rows, hidden], weight [hidden], all fp16; hidden a multiple of 8, at most 16384; y may be x, residual nothing else
//
// Rounding is that of vLLM's ops, one after another: fp16 of the ranks' sum (of fp32), of the residual, of residual / sqrt(…), and of
// that times weight. Squares are summed in fp32, a thread's, a warp's, a block's, in an order that the shape alone decides: the same
// bits on every run and on every rank.
//
// A block has a row, and keeps it in registers as units of words, two halves each: 4, or 7 where ranks meet, which travel as two lines.
// The other operands are asked for before the ranks' lines are waited for. Rows of one call are at most kReduceBlocks where ranks
// meet, so that all are on a V100 at once.
//
// Bytes: 8 * rows * hidden, in the L2 mostly. What it costs is a launch, the ranks' ways to each other, and from the last line to the
// last y 1.9 µs on an H200, where a kernel of its own takes 2.1 (docs/results/all-reduce-h200-2026-11-30.json): a row's instructions
// all wait for one multiprocessor, so there must be few.
#pragma once

#include "cuda/all_reduce/all_reduce.cuh"
#include "cuda/common/dependent.cuh"
#include "cuda/norm/args.h"

namespace voltserve {

template <bool kReduce>
struct Unit {
  static constexpr int kWords = (kReduce ? kNormNumbersOfRanks : kNormNumbers) / 2;
  uint32_t words[kWords];
};

// A unit of a row; zeros beyond the row's end.
template <bool kReduce>
__device__ inline Unit<kReduce> load_unit(const __half *row, int unit, int hidden) {
  if constexpr (kReduce) {
    Unit<true> loaded;
    const int first = unit * 7;
#pragma unroll
    for (int w = 0; w < 7; ++w) loaded.words[w] = first + w < hidden / 2 ? reinterpret_cast<const uint32_t *>(row)[first + w] : 0;
    return loaded;
  } else {
    if (unit * kNormNumbers >= hidden) return {};
    const uint4 words = reinterpret_cast<const uint4 *>(row)[unit];
    return {{words.x, words.y, words.z, words.w}};
  }
}

// Nothing beyond the row's end.
template <bool kReduce>
__device__ inline void store_unit(__half *row, int unit, int hidden, const Unit<kReduce> &stored) {
  const uint32_t *const words = stored.words;
  if constexpr (kReduce) {
    const int first = unit * 7;
#pragma unroll
    for (int w = 0; w < 7; ++w) {
      if (first + w < hidden / 2) reinterpret_cast<uint32_t *>(row)[first + w] = words[w];
    }
  } else if (unit * kNormNumbers < hidden) {
    reinterpret_cast<uint4 *>(row)[unit] = {words[0], words[1], words[2], words[3]};
  }
}

// A unit's 14 numbers as two lines of 7, and back.
__device__ inline Line first_line(const Unit<true> &unit) {
  const uint32_t *const w = unit.words;
  return {{w[0], w[1], w[2], w[3] & 0xFFFF}};
}

__device__ inline Line second_line(const Unit<true> &unit) {
  const uint32_t *const w = unit.words;
  return {{__funnelshift_r(w[3], w[4], 16), __funnelshift_r(w[4], w[5], 16), __funnelshift_r(w[5], w[6], 16), w[6] >> 16}};
}

__device__ inline Unit<true> joined(const Line &one, const Line &other) {
  const uint32_t *const a = one.words, *const b = other.words;
  return {{a[0], a[1], a[2], __byte_perm(a[3], b[0], 0x5410), __funnelshift_r(b[0], b[1], 16), __funnelshift_r(b[1], b[2], 16),
           __byte_perm(b[2], b[3], 0x5432)}};
}

__device__ inline half2 pair(const uint32_t &word) { return *reinterpret_cast<const half2 *>(&word); }
__device__ inline uint32_t bits(half2 two) { return *reinterpret_cast<const uint32_t *>(&two); }

// Everybody's sum, by all threads of the block.
__device__ inline float block_sum(float part) {
  __shared__ float warps[kNormThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) part += __shfl_xor_sync(~0u, part, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  part = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) part += __shfl_xor_sync(~0u, part, lanes);
  return part;
}

// One block a multiprocessor is enough, and said: else the compiler keeps to 64 registers, and the commonest rows of ranks spill.
template <int kUnits, bool kReduce>
__global__ void __launch_bounds__(kNormThreads, 1) norm_kernel(const NormArgs args) {
  constexpr int kWords = Unit<kReduce>::kWords;
  let_next_start();
  const ReduceArgs &reduce = args.reduce;
  const int hidden = args.hidden;
  const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
  auto unit = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x); };
  Unit<kReduce> x[kUnits], residual[kUnits], weight[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) weight[i] = load_unit<kReduce>(args.weight, unit(i), hidden);
  wait_for_earlier();

#pragma unroll
  for (int i = 0; i < kUnits; ++i) x[i] = load_unit<kReduce>(static_cast<const __half *>(reduce.x) + row, unit(i), hidden);
  uint32_t turn = 0;
  Patience patience;
  int places[2 * kUnits];
  if constexpr (kReduce) {
    const int units = ceil_div(hidden, kNormNumbersOfRanks);
    turn = reduce.turns[blockIdx.x];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const bool there = unit(i) < units;
      const int first = 2 * static_cast<int>(blockIdx.x) * units + unit(i);  // of a warp one after another
      places[2 * i] = there ? first : -1;
      places[2 * i + 1] = there ? first + units : -1;
      if (!there) continue;
      send(reduce, turn, places[2 * i], first_line(x[i]));
      send(reduce, turn, places[2 * i + 1], second_line(x[i]));
    }
    if (blockIdx.x == 0) renew(reduce, turn, 2 * args.rows * units);
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    residual[i] = args.residual ? load_unit<kReduce>(args.residual + row, unit(i), hidden) : Unit<kReduce>{};
  }
  if constexpr (kReduce) {
    float2 sums[kUnits][kWords] = {};
#pragma unroll 1
    for (int rank = 0; rank < reduce.ranks; ++rank) {
      Line lines[2 * kUnits];
      if (rank != reduce.rank) receive(reduce, turn, rank, places, lines, patience);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const Unit<true> part = rank == reduce.rank ? x[i] : joined(lines[2 * i], lines[2 * i + 1]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const float2 two = __half22float2(pair(part.words[w]));
          sums[i][w].x += two.x;
          sums[i][w].y += two.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) x[i].words[w] = bits(__floats2half2_rn(sums[i][w].x, sums[i][w].y));
    }
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (args.residual) x[i].words[w] = bits(__hadd2(pair(x[i].words[w]), pair(residual[i].words[w])));
      const float2 two = __half22float2(pair(x[i].words[w]));
      squares += two.x * two.x + two.y * two.y;
    }
    if (args.residual) store_unit<kReduce>(args.residual + row, unit(i), hidden, x[i]);
  }
  const float scale = rsqrtf(block_sum(squares) / hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    Unit<kReduce> y;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float2 two = __half22float2(pair(x[i].words[w]));
      y.words[w] = bits(__hmul2(__floats2half2_rn(two.x * scale, two.y * scale), pair(weight[i].words[w])));
    }
    store_unit<kReduce>(static_cast<__half *>(reduce.y) + row, unit(i), hidden, y);
  }
  if constexpr (kReduce) end_turn(reduce, turn, args.rows, patience);
}

}  // namespace voltserve
