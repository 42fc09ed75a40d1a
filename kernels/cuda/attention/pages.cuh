// What the attention kernels share: addresses in the paged cache, which request a block works on, and the softmax's arithmetic.
// Scores are kept times log2(e), so that exponentials are powers of two.
#pragma once

#include "cuda/attention/args.h"
#include "cuda/common/layout.cuh"

namespace voltserve {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x with a relative error of at most 2^-22, and exactly 0 for -infinity.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c * tanh(x), for soft-capped scores; the error is below 2^-20 c.
__device__ inline float capped(float x, float c) { return c - __fdividef(2 * c, exp2_fast(x * (2 * kLog2e)) + 1); }

__device__ inline float2 to_float2(uint32_t halves) { return __half22float2(as_half2(halves)); }

// Eight halves as floats.
__device__ inline void to_floats(const uint4 &halves, float (&f)[8]) {
  const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_float2(words[i]);
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}

__device__ inline uint4 to_halves(const float (&f)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = as_bits(__floats2half2_rn(f[2 * i], f[2 * i + 1]));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The blocks of one request's cache. A group of 8 positions always lies in one block.
struct Pages {
  const int *table;
  uint32_t reciprocal;  // ceil(2^31 / eights): exact quotients below 2^20 groups and 2^11 groups per block
  int eights, block_chunks, token_chunks, base;

  __device__ Pages(const AttentionArgs &args, int request, int kv_head)
      : table(args.block_table + static_cast<size_t>(request) * args.table_stride),
        eights(args.block_size / 8),
        block_chunks(args.block_chunks),
        token_chunks(args.token_chunks),
        base(kv_head * args.head_chunks) {
    reciprocal = (0x80000000u + eights - 1) / eights;
  }
  // The offset of `position` in either cache, in chunks of 16 bytes.
  __device__ int chunk(int position) const {
    const int eight = position / 8, block = __umulhi(2 * eight, reciprocal);
    return base + __ldg(table + block) * block_chunks + (position - 8 * eights * block) * token_chunks;
  }
};

// A request's new tokens: their number, their first row of q, and the position of the first.
struct Query {
  int first, count, context, length;

  __device__ Query(const AttentionArgs &args, int request) {
    first = __ldg(args.query_start + request);
    count = __ldg(args.query_start + request + 1) - first;
    length = __ldg(args.seq_lens + request);
    context = length - count;
  }
  // New token `token` sees positions begin .. end - 1.
  __device__ int end(int token) const { return context + token + 1; }
  __device__ int begin(int token, int window) const { return window > 0 ? max(0, end(token) - window) : 0; }
};

__device__ inline int sum_of_warp(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, value);
#else
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(~0u, value, width);
  return value;
#endif
}

// Sums count(request) over all requests. Every warp computes it, so blocks need no shared memory and no barrier.
template <class Count>
__device__ int sum_over(int requests, Count count) {
  int sum = 0;
  for (int b = threadIdx.x % 32; b < requests; b += 32) sum += count(b);
  return sum_of_warp(sum);
}

// The request to which item number `item` belongs, and the number of that request's first item. Request b has count(b) items. -1 if
// there are fewer items.
template <class Count>
__device__ int find_request(int requests, int item, int &first_item, Count count) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < requests; base += 32) {
    const int own = base + lane < requests ? count(base + lane) : 0;
    int through = own;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const int other = __shfl_up_sync(~0u, through, width);
      if (lane >= width) through += other;
    }
    const unsigned past = __ballot_sync(~0u, before + through > item);
    if (past != 0) {
      const int found = __ffs(past) - 1;
      first_item = before + __shfl_sync(~0u, through - own, found);
      return base + found;
    }
    before += __shfl_sync(~0u, through, 31);
  }
  return -1;
}

}  // namespace voltserve
