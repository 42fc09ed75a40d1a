// Query, key and value on their way from the GEMM that made them to attention, as one kernel:
//
//     q, k = x / sqrt(mean(x^2) + eps) * weight    per head, where the model has such norms
//     q, k = a cos - b sin, b cos + a sin          for pairs (a, b) of the first `rotated` dimensions, by the token's position
//     q is overwritten in place; k and v go to their slots of the paged cache
//
// head_dim is a multiple of 8, at most 256; rotated is a multiple of 4. Rounding is that of vLLM's separate ops: to fp16 after the
// division, after the multiplication by weight, after each product of the rotation, and after their sum. Squares are summed in
// fp32, per lane, then per warp.
//
// A warp has one head of one token. Lane l holds dimensions 2 l, 2 l + 1, then the pair 64 further on, and so forth. It also loads the
// dimensions that its own are paired with, instead of asking another lane. So all loads are in flight at once; the second load of a
// number hits the cache.
//
// Bytes: q, k and v once in and once out. At few tokens the kernel takes a launch and three trips to L2.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/layout.cuh"
#include "cuda/rotate/args.h"

namespace voltserve {

constexpr int kRotateThreads = 128, kRotateWarps = kRotateThreads / 32;

// A pair of dimensions after the norm.
__device__ inline half2 normalized(half2 x, half2 weight, float factor) {
  const float2 value = __half22float2(x);
  return __hmul2_rn(__floats2half2_rn(value.x * factor, value.y * factor), weight);
}

// cos and sin of the angle of each dimension that a lane has. `turned` pairs are rotated, and partners lie `apart` pairs apart.
template <int kPairs, bool kHalves>
__device__ __forceinline__ void load_angles(const __half *cosines, const __half *sines, int turned, int apart,
                                            half2 (&cosine)[kPairs], half2 (&sine)[kPairs]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    const int i = lane + 32 * c;
    cosine[c] = sine[c] = __floats2half2_rn(0, 0);
    if (i >= turned) continue;
    if (kHalves) {
      const int angles = i < apart ? i : i - apart;
      cosine[c] = __ldg(reinterpret_cast<const half2 *>(cosines) + angles);
      sine[c] = __ldg(reinterpret_cast<const half2 *>(sines) + angles);
    } else {
      cosine[c] = __half2half2(__ldg(cosines + i));
      sine[c] = __half2half2(__ldg(sines + i));
    }
  }
}

// The RMS norm of a warp's head: of each lane's own dimensions, and of those they are paired with.
template <int kPairs, bool kHalves>
__device__ __forceinline__ void normalize(const RotateArgs &args, const half2 (&own_weight)[kPairs],
                                          const half2 (&other_weight)[kPairs], half2 (&own)[kPairs], half2 (&other)[kPairs]) {
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    const float2 both = __half22float2(own[c]);
    squares += both.x * both.x + both.y * both.y;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(0xFFFFFFFF, squares, lanes);
  const float factor = rsqrtf(squares / args.head_dim + args.eps);
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    own[c] = normalized(own[c], own_weight[c], factor);
    if (kHalves) other[c] = normalized(other[c], other_weight[c], factor);
  }
}

// kPairs: pairs of dimensions per lane, for heads of at most 64 kPairs. kHalves: RotateArgs::halves. kNorms: with weights.
// Grid: one warp per head of each token.
template <int kPairs, bool kHalves, bool kNorms>
__global__ void __launch_bounds__(kRotateThreads) rotate_kernel(const RotateArgs args) {
  allow_next_launch();
  const int lane = threadIdx.x % 32, heads = args.q_heads + 2 * args.kv_heads;
  const int unit = blockIdx.x * kRotateWarps + threadIdx.x / 32, token = unit / heads, head = unit - token * heads;
  wait_for_previous();
  if (token >= args.tokens) return;
  const bool query = head < args.q_heads, value = head >= args.q_heads + args.kv_heads;
  const int kv_head = head - args.q_heads - (value ? args.kv_heads : 0), pairs = args.head_dim / 2;
  // Slots fit 32 bits, because the caches' 16-byte chunks do.
  const int slot = query ? 0 : token < args.cached ? static_cast<int>(load_written(args.slots + token)) : -1;
  const size_t position = value ? 0 : load_written(args.positions + token);

  const __half *const rows = query ? args.q : value ? args.value : args.key;
  const int stride = query ? args.q_stride : value ? args.value_stride : args.key_stride;
  const __half *const from = rows + static_cast<size_t>(token) * stride + (query ? head : kv_head) * args.head_dim;
  const half2 *const x = reinterpret_cast<const half2 *>(from);
  const half2 *const weight = reinterpret_cast<const half2 *>(query ? args.q_weight : args.k_weight);
  const int turned = value ? 0 : args.rotated / 2, apart = turned / 2;  // in pairs
  auto partner = [&](int i) { return !kHalves || i >= turned ? i : i < apart ? i + apart : i - apart; };

  half2 own[kPairs], other[kPairs], own_weight[kPairs], other_weight[kPairs];
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    const int i = lane + 32 * c;
    own[c] = other[c] = own_weight[c] = other_weight[c] = __floats2half2_rn(0, 0);
    if (i >= pairs) continue;
    own[c] = x[i];
    if (kHalves) other[c] = x[partner(i)];
    if (!kNorms || value) continue;
    own_weight[c] = __ldg(weight + i);
    if (kHalves) other_weight[c] = __ldg(weight + partner(i));
  }
  // The position has arrived by now.
  const __half *const cosines = args.cos_sin + position * args.rotated, *const sines = cosines + args.rotated / 2;
  half2 cosine[kPairs], sine[kPairs];
  load_angles<kPairs, kHalves>(cosines, sines, turned, apart, cosine, sine);
  if (kNorms && !value) normalize<kPairs, kHalves>(args, own_weight, other_weight, own, other);
  if (slot < 0) return;

  half2 *to = const_cast<half2 *>(x);
  if (!query) {
    const int block = slot / args.block_size;
    const int64_t at = static_cast<int64_t>(block) * args.block_chunks + (slot - block * args.block_size) * args.token_chunks +
                       static_cast<int64_t>(kv_head) * args.head_chunks;
    to = reinterpret_cast<half2 *>(reinterpret_cast<uint4 *>(value ? args.v_cache : args.k_cache) + at);
  }
  __syncwarp();  // other lanes have read q before it is overwritten
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    const int i = lane + 32 * c;
    half2 result = own[c];
    if (i < turned) {
      const half2 pair = kHalves ? other[c] : __lowhigh2highlow(own[c]);
      const half2 with_cosine = __hmul2_rn(own[c], cosine[c]), with_sine = __hmul2_rn(pair, sine[c]);
      const half2 less = __hsub2_rn(with_cosine, with_sine), more = __hadd2_rn(with_cosine, with_sine);
      result = kHalves ? (i < apart ? less : more) : __halves2half2(__low2half(less), __high2half(more));
    }
    if (i < pairs) to[i] = result;
  }
}

}  // namespace voltserve
