// Norm and rotation as layers of their own, for steps that are not fused: eager ones, and models whose steps are not recorded.
// Recorded steps have the norm in the all-reduce (cuda/norm) and the rotation before the cache (cuda/rotate).
//
//   norm:      y[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight       with a residual, x[r] + residual[r] instead of x[r]
//   rotation:  (a, b) -> (a cos - b sin, b cos + a sin)
//
// Both are bound by memory: the norm reads and writes each number once (with a residual twice), the rotation likewise. Sums are fp32;
// the norm is rounded to fp16 before the multiplication by its weight, and the rotation after each operation. vLLM's kernels round
// likewise, so texts are the same with either.
#pragma once

#include <cuda_fp16.h>

#include "cuda/plain/args.h"

namespace voltserve {

constexpr int kPlainThreads = 1024;  // the most of a block
constexpr int kPlainChunk = 8;       // halves that a thread moves at once, 16 bytes
constexpr int kPlainChunks = kPlainNormWidth / (kPlainThreads * kPlainChunk);

struct alignas(16) PlainChunk {
  __half2 pairs[kPlainChunk / 2];
};

// The sum over a block. Each warp writes its part, and the barrier makes all parts visible before a thread reads them.
__device__ inline float plain_block_sum(float value) {
  __shared__ float parts[kPlainThreads / 32];
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  return sum;
}

// Grid: one block per row. A thread holds its part of the row in registers between the sum and the multiplication, so x is read once.
__global__ void __launch_bounds__(kPlainThreads) plain_norm_kernel(const PlainNormArgs args) {
  const int64_t row = blockIdx.x;
  const __half *from = args.x + row / args.heads * args.x_token + row % args.heads * args.x_head;
  PlainChunk held[kPlainChunks];
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kPlainChunks; ++c) {
    const int i = (c * blockDim.x + threadIdx.x) * kPlainChunk;
    if (i >= args.width) continue;
    held[c] = *reinterpret_cast<const PlainChunk *>(from + i);
    if (args.residual != nullptr) {
      PlainChunk &added = *reinterpret_cast<PlainChunk *>(args.residual + row * args.width + i);
#pragma unroll
      for (int p = 0; p < kPlainChunk / 2; ++p) held[c].pairs[p] = __hadd2(held[c].pairs[p], added.pairs[p]);
      added = held[c];
    }
#pragma unroll
    for (int p = 0; p < kPlainChunk / 2; ++p) {
      const float2 value = __half22float2(held[c].pairs[p]);
      squares += value.x * value.x + value.y * value.y;
    }
  }
  const float scale = rsqrtf(plain_block_sum(squares) / args.width + args.eps);
#pragma unroll
  for (int c = 0; c < kPlainChunks; ++c) {
    const int i = (c * blockDim.x + threadIdx.x) * kPlainChunk;
    if (i >= args.width) continue;
    const PlainChunk factors = *reinterpret_cast<const PlainChunk *>(args.weight + i);
#pragma unroll
    for (int p = 0; p < kPlainChunk / 2; ++p) {
      const float2 value = __half22float2(held[c].pairs[p]);
      held[c].pairs[p] = __hmul2(__floats2half2_rn(value.x * scale, value.y * scale), factors.pairs[p]);
    }
    *reinterpret_cast<PlainChunk *>(args.y + row * args.width + i) = held[c];
  }
}

// Grid: x the tokens, y the heads; one warp per head.
__global__ void __launch_bounds__(32) plain_rotary_kernel(const PlainRotaryArgs args) {
  const __half *row = args.cos_sin + args.positions[blockIdx.x] * args.rotated;
  __half *head = args.x + blockIdx.x * args.x_token + blockIdx.y * args.x_head;
  const int half = args.rotated / 2;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const __half c = row[i], s = row[half + i];
    __half &first = head[args.halves ? i : 2 * i], &second = head[args.halves ? half + i : 2 * i + 1];
    const __half a = first, b = second;
    first = __hsub_rn(__hmul_rn(a, c), __hmul_rn(b, s));
    second = __hadd_rn(__hmul_rn(b, c), __hmul_rn(a, s));
  }
}

}  // namespace voltserve
