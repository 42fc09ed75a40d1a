// What lies between two GEMMs along the residual stream, as one kernel:
//
//     x = x_0 + x_1 + ... + x_{R-1}    an all-reduce of the ranks' x (all_reduce/all_reduce.cuh), or x itself
//     residual += x
//     y = residual / sqrt(mean(residual^2) + eps) * weight
//
//   x, residual, y [rows, hidden] and weight [hidden], all fp16; hidden a multiple of 8, at most 16384
//   y may be x; residual overlaps nothing else
//
// Rounding is that of vLLM's separate ops: to fp16 after the ranks' sum (in fp32), after the addition, after the division and after
// the multiplication by weight. Squares are summed in fp32, per thread, warp and block, in an order that only the shape decides.
// So every run and every rank gives the same bits.
//
// A block has one row and keeps it in registers as vectors: 8 numbers each, or 14 where ranks meet, which travel as two lines. The
// other operands are loaded before the ranks' lines are awaited. Where ranks meet, a call has at most kReduceBlocks rows, so that all
// blocks are resident on a V100 at once.
//
// Bytes: 8 * rows * hidden, mostly in L2. The cost is a launch, the ranks' exchange, and the time from the last line to the last y:
// 1.9 us on an H200, where a kernel of its own takes 2.1 (docs/results/all-reduce-h200-2026-11-30.json). All instructions of a row
// run on one multiprocessor, so there must be few.
#pragma once

#include "cuda/all_reduce/all_reduce.cuh"
#include "cuda/common/dependent.cuh"
#include "cuda/norm/args.h"

namespace voltserve {

template <bool kReduce>
struct Vector {
  static constexpr int kWords = (kReduce ? kNormNumbersOfRanks : kNormNumbers) / 2;
  uint32_t words[kWords];
};

// Vector number `vector` of a row, with zeros past the row's end.
template <bool kReduce>
__device__ inline Vector<kReduce> load_vector(const __half *row, int vector, int hidden) {
  if constexpr (kReduce) {
    Vector<true> loaded;
    const int first = vector * 7;
#pragma unroll
    for (int w = 0; w < 7; ++w) loaded.words[w] = first + w < hidden / 2 ? reinterpret_cast<const uint32_t *>(row)[first + w] : 0;
    return loaded;
  } else {
    if (vector * kNormNumbers >= hidden) return {};
    const uint4 words = reinterpret_cast<const uint4 *>(row)[vector];
    return {{words.x, words.y, words.z, words.w}};
  }
}

// Writes nothing past the row's end.
template <bool kReduce>
__device__ inline void store_vector(__half *row, int vector, int hidden, const Vector<kReduce> &stored) {
  const uint32_t *const words = stored.words;
  if constexpr (kReduce) {
    const int first = vector * 7;
#pragma unroll
    for (int w = 0; w < 7; ++w) {
      if (first + w < hidden / 2) reinterpret_cast<uint32_t *>(row)[first + w] = words[w];
    }
  } else if (vector * kNormNumbers < hidden) {
    reinterpret_cast<uint4 *>(row)[vector] = {words[0], words[1], words[2], words[3]};
  }
}

// A vector of 14 numbers as two lines of 7, and back.
__device__ inline Line first_line(const Vector<true> &vector) {
  const uint32_t *const w = vector.words;
  return {{w[0], w[1], w[2], w[3] & 0xFFFF}};
}

__device__ inline Line second_line(const Vector<true> &vector) {
  const uint32_t *const w = vector.words;
  return {{__funnelshift_r(w[3], w[4], 16), __funnelshift_r(w[4], w[5], 16), __funnelshift_r(w[5], w[6], 16), w[6] >> 16}};
}

__device__ inline Vector<true> joined(const Line &one, const Line &other) {
  const uint32_t *const a = one.words, *const b = other.words;
  return {{a[0], a[1], a[2], __byte_perm(a[3], b[0], 0x5410), __funnelshift_r(b[0], b[1], 16), __funnelshift_r(b[1], b[2], 16),
           __byte_perm(b[2], b[3], 0x5432)}};
}

__device__ inline half2 pair(const uint32_t &word) { return *reinterpret_cast<const half2 *>(&word); }
__device__ inline uint32_t bits(half2 two) { return *reinterpret_cast<const uint32_t *>(&two); }

// The sum over all threads of the block, which all of them get.
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

// One block per multiprocessor is enough. Without this bound the compiler uses at most 64 registers, and common rows of ranks spill.
template <int kVectors, bool kReduce>
__global__ void __launch_bounds__(kNormThreads, 1) norm_kernel(const NormArgs args) {
  constexpr int kWords = Vector<kReduce>::kWords;
  allow_next_launch();
  const ReduceArgs &reduce = args.reduce;
  const int hidden = args.hidden;
  const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
  auto vector = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x); };
  Vector<kReduce> x[kVectors], residual[kVectors], weight[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) weight[i] = load_vector<kReduce>(args.weight, vector(i), hidden);
  wait_for_previous();

#pragma unroll
  for (int i = 0; i < kVectors; ++i) x[i] = load_vector<kReduce>(static_cast<const __half *>(reduce.x) + row, vector(i), hidden);
  uint32_t epoch = 0;
  Patience patience;
  int places[2 * kVectors];
  if constexpr (kReduce) {
    const int vectors = ceil_div(hidden, kNormNumbersOfRanks);
    epoch = reduce.epochs[blockIdx.x];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool there = vector(i) < vectors;
      const int first = 2 * static_cast<int>(blockIdx.x) * vectors + vector(i);  // consecutive within a warp
      places[2 * i] = there ? first : -1;
      places[2 * i + 1] = there ? first + vectors : -1;
      if (!there) continue;
      send(reduce, epoch, places[2 * i], first_line(x[i]));
      send(reduce, epoch, places[2 * i + 1], second_line(x[i]));
    }
    if (blockIdx.x == 0) renew(reduce, epoch, 2 * args.rows * vectors);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    residual[i] = args.residual ? load_vector<kReduce>(args.residual + row, vector(i), hidden) : Vector<kReduce>{};
  }
  if constexpr (kReduce) {
    float2 sums[kVectors][kWords] = {};
#pragma unroll 1
    for (int rank = 0; rank < reduce.ranks; ++rank) {
      Line lines[2 * kVectors];
      if (rank != reduce.rank) receive(reduce, epoch, rank, places, lines, patience);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const Vector<true> part = rank == reduce.rank ? x[i] : joined(lines[2 * i], lines[2 * i + 1]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const float2 two = __half22float2(pair(part.words[w]));
          sums[i][w].x += two.x;
          sums[i][w].y += two.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) x[i].words[w] = bits(__floats2half2_rn(sums[i][w].x, sums[i][w].y));
    }
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (args.residual) x[i].words[w] = bits(__hadd2(pair(x[i].words[w]), pair(residual[i].words[w])));
      const float2 two = __half22float2(pair(x[i].words[w]));
      squares += two.x * two.x + two.y * two.y;
    }
    if (args.residual) store_vector<kReduce>(args.residual + row, vector(i), hidden, x[i]);
  }
  const float scale = rsqrtf(block_sum(squares) / hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    Vector<kReduce> y;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float2 two = __half22float2(pair(x[i].words[w]));
      y.words[w] = bits(__hmul2(__floats2half2_rn(two.x * scale, two.y * scale), pair(weight[i].words[w])));
    }
    store_vector<kReduce>(static_cast<__half *>(reduce.y) + row, vector(i), hidden, y);
  }
  if constexpr (kReduce) end_epoch(reduce, epoch, args.rows, patience);
}

}  // namespace voltserve
