// What lies between one product and the next along the residual stream, as one kernel:
//
//     x = x_0 + x_1 + … + x_{R-1}    an all-reduce of the ranks' x (all_reduce.cuh), or x itself
//     residual += x
//     y = residual / sqrt(mean(residual^2) + eps) * weight
//
//   x, residual, y [rows, hidden], weight [hidden], all fp16; hidden a multiple of 8, at most 16384; y may be x, residual nothing else
//
// Rounding is that of vLLM's ops, one after another: fp16 of the ranks' sum (of fp32), of the residual, of residual / sqrt(…), and of
// that times weight. Squares are summed in fp32, a thread's, a warp's, a block's, in an order that the shape alone decides: the same
// bits on every run and on every rank.
//
// A block has a row, and keeps it in registers: 7 numbers a line and thread, which is also how they travel between ranks, or 8. The
// other operands are asked for before the ranks' lines are waited for. Blocks beyond the rows read the next product's weights
// ahead (ahead.cuh). Rows of one call are at most kReduceBlocks where ranks meet, so that all are on a V100 at once.
//
// Bytes: 8 * rows * hidden, in the L2 mostly. What it costs is a launch, the ranks' ways to each other, and some 1 µs from the last
// line to the last y: a sum over the block, no more.
#pragma once

#include "ahead.cuh"
#include "all_reduce.cuh"
#include "dependent.cuh"
#include "norm.h"

namespace voltserve {

// A unit of a row: 7 or 8 halves as 4 words. The eighth of 7 is zero.
template <bool kReduce>
__device__ inline Line load_unit(const __half *row, int unit, int hidden) {
  if constexpr (kReduce) {
    return load(row, unit * kLineHalves, hidden);
  } else {
    const uint4 words = reinterpret_cast<const uint4 *>(row)[unit];
    return {{words.x, words.y, words.z, words.w}};
  }
}

template <bool kReduce>
__device__ inline void store_unit(__half *row, int unit, int hidden, const Line &line) {
  if constexpr (kReduce) {
    store(row, unit * kLineHalves, hidden, line);
  } else {
    reinterpret_cast<uint4 *>(row)[unit] = {line.words[0], line.words[1], line.words[2], line.words[3]};
  }
}

__device__ inline half2 pair(const Line &line, int w) { return *reinterpret_cast<const half2 *>(&line.words[w]); }
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

template <int kUnits, bool kReduce>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const NormArgs args) {
  let_next_start();
  if (blockIdx.x >= args.rows) {
    read_ahead(args.ahead, blockIdx.x - args.rows, gridDim.x - args.rows);
    return;
  }
  const ReduceArgs &reduce = args.reduce;
  const int hidden = args.hidden, units = ceil_div(hidden, kReduce ? kLineHalves : kNormNumbers);
  const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
  auto unit = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x); };
  wait_for_earlier();

  Line x[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    x[i] = unit(i) < units ? load_unit<kReduce>(static_cast<const __half *>(reduce.x) + row, unit(i), hidden) : Line{};
  }
  int places[kUnits] = {};
  uint32_t turn = 0;
  Patience patience;
  if constexpr (kReduce) {
    turn = reduce.turns[blockIdx.x];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      places[i] = unit(i) < units ? static_cast<int>(blockIdx.x) * units + unit(i) : -1;
      if (places[i] >= 0) send(reduce, turn, places[i], x[i]);
    }
    if (blockIdx.x == 0) renew(reduce, turn, args.rows * units);
  }
  Line residual[kUnits], weight[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool there = unit(i) < units;
    residual[i] = there && args.residual ? load_unit<kReduce>(args.residual + row, unit(i), hidden) : Line{};
    weight[i] = there ? load_unit<kReduce>(args.weight, unit(i), hidden) : Line{};
  }
  if constexpr (kReduce) {
    Sums<__half> sums[kUnits];
    sum_lines(reduce, turn, places, x, sums, patience);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) x[i] = sums[i].rounded();
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (args.residual) x[i].words[w] = bits(__hadd2(pair(x[i], w), pair(residual[i], w)));
      const float2 two = __half22float2(pair(x[i], w));
      squares += two.x * two.x + two.y * two.y;
    }
    if (args.residual && unit(i) < units) store_unit<kReduce>(args.residual + row, unit(i), hidden, x[i]);
  }
  const float scale = rsqrtf(block_sum(squares) / hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    Line y;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 two = __half22float2(pair(x[i], w));
      y.words[w] = bits(__hmul2(__floats2half2_rn(two.x * scale, two.y * scale), pair(weight[i], w)));
    }
    if (unit(i) < units) store_unit<kReduce>(static_cast<__half *>(reduce.y) + row, unit(i), hidden, y);
  }
  if constexpr (kReduce) end_turn(reduce, turn, args.rows, patience);
}

}  // namespace voltserve
