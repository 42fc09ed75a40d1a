// Query, key and value on their way from the product that made them to attention, as one kernel:
//
//     q, k = x / sqrt(mean(x^2) + eps) * weight    of each head, where the model has such norms
//     q, k = a cos - b sin, b cos + a sin          of pairs (a, b) of the first `rotated` dimensions, by the token's position
//     q stays where it is; k and v go to their slots of the paged cache
//
// head_dim a multiple of 8, at most 256; rotated a multiple of 4. Rounding is that of vLLM's ops, one after another: fp16 of x / sqrt(…),
// of that times weight, of each product of the rotation, and of their sum. Squares are summed in fp32, a lane's, then a warp's.
//
// A warp has a head of a token. Lane l holds dimensions 2 l, 2 l + 1, and 64 further on and so forth, and loads what they are paired
// with a second time instead of asking another lane: all loads are under way at once, and none comes from memory twice. Blocks
// beyond those read the weights of the product after attention ahead (ahead.cuh).
//
// Bytes: 2 heads of q, k and v each, once in and once out: at few tokens the kernel's time is a launch and three trips to the L2.
#pragma once

#include "ahead.cuh"
#include "layout.cuh"
#include "rotate.h"

namespace voltserve {

constexpr int kRotateThreads = 128, kRotateWarps = kRotateThreads / 32;
constexpr int kRotatePairs = 4;  // of two dimensions, of a lane, at most

// A head's dimensions 2 i and 2 i + 1, normalized.
struct RotatedHead {
  const half2 *from, *weight;  // no weight: no norm
  float factor;
  __device__ half2 normalized(half2 x, half2 w) const {
    if (weight == nullptr) return x;
    const float2 value = __half22float2(x);
    return __hmul2_rn(__floats2half2_rn(value.x * factor, value.y * factor), w);
  }
};

// Grid: `blocks` for the heads of all tokens, and more to read ahead.
__global__ void __launch_bounds__(kRotateThreads) rotate_kernel(const RotateArgs args, const Ahead ahead, const unsigned blocks) {
  if (blockIdx.x >= blocks) return read_ahead(ahead, blockIdx.x - blocks, gridDim.x - blocks);
  const int lane = threadIdx.x % 32, heads = args.q_heads + 2 * args.kv_heads;
  const int unit = blockIdx.x * kRotateWarps + threadIdx.x / 32, token = unit / heads, head = unit - token * heads;
  if (token >= args.tokens) return;
  const bool query = head < args.q_heads, value = head >= args.q_heads + args.kv_heads;
  const int kv_head = head - args.q_heads - (value ? args.kv_heads : 0);
  const int64_t slot = query ? 0 : token < args.cached ? __ldg(args.slots + token) : -1;
  const int64_t position = value ? 0 : __ldg(args.positions + token);

  const __half *const from =
      query   ? args.q + static_cast<size_t>(token) * args.q_stride + head * args.head_dim
      : value ? args.value + static_cast<size_t>(token) * args.value_stride + kv_head * args.head_dim
              : args.key + static_cast<size_t>(token) * args.key_stride + kv_head * args.head_dim;
  RotatedHead x{reinterpret_cast<const half2 *>(from),
                reinterpret_cast<const half2 *>(value ? nullptr : query ? args.q_weight : args.k_weight), 0};
  const int pairs = args.head_dim / 2, turned = value ? 0 : args.rotated / 2, apart = args.halves ? turned / 2 : 0;
  auto partner = [&](int i) { return i >= turned ? i : i < apart ? i + apart : i - apart; };  // i itself for neighbours

  half2 own[kRotatePairs], other[kRotatePairs], own_weight[kRotatePairs], other_weight[kRotatePairs];
  const half2 none = __floats2half2_rn(0, 0);
#pragma unroll
  for (int c = 0; c < kRotatePairs; ++c) {
    const int i = lane + 32 * c;
    own[c] = i < pairs ? x.from[i] : none;
    other[c] = i < pairs ? x.from[partner(i)] : none;
    const bool scaled = i < pairs && x.weight != nullptr;
    own_weight[c] = scaled ? __ldg(x.weight + i) : none;
    other_weight[c] = scaled ? __ldg(x.weight + partner(i)) : none;
  }
  // By now position is known: cos and sin of an angle of each dimension's, neighbours' both of the same.
  const __half *const cos_row = args.cos_sin + position * args.rotated, *const sin_row = cos_row + args.rotated / 2;
  half2 cosine[kRotatePairs], sine[kRotatePairs];
#pragma unroll
  for (int c = 0; c < kRotatePairs; ++c) {
    const int i = lane + 32 * c;
    cosine[c] = sine[c] = none;
    if (i >= turned) continue;
    if (args.halves) {
      const int angles = i < apart ? i : i - apart;
      cosine[c] = __ldg(reinterpret_cast<const half2 *>(cos_row) + angles);
      sine[c] = __ldg(reinterpret_cast<const half2 *>(sin_row) + angles);
    } else {
      cosine[c] = __half2half2(__ldg(cos_row + i));
      sine[c] = __half2half2(__ldg(sin_row + i));
    }
  }
  if (x.weight != nullptr) {
    float squares = 0;
#pragma unroll
    for (int c = 0; c < kRotatePairs; ++c) {
      const float2 both = __half22float2(own[c]);
      squares += both.x * both.x + both.y * both.y;
    }
#pragma unroll
    for (int apart_lanes = 16; apart_lanes > 0; apart_lanes /= 2) squares += __shfl_xor_sync(0xFFFFFFFF, squares, apart_lanes);
    x.factor = rsqrtf(squares / args.head_dim + args.eps);
  }
  if (slot < 0) return;

  half2 *to = reinterpret_cast<half2 *>(const_cast<__half *>(from));
  if (!query) {
    const int64_t block = slot / args.block_size;
    const int64_t at = block * args.block_chunks + (slot - block * args.block_size) * args.token_chunks +
                       static_cast<int64_t>(kv_head) * args.head_chunks;
    to = reinterpret_cast<half2 *>(reinterpret_cast<uint4 *>(value ? args.v_cache : args.k_cache) + at);
  }
  __syncwarp();  // q is read by other lanes, too, before it is overwritten
#pragma unroll
  for (int c = 0; c < kRotatePairs; ++c) {
    const int i = lane + 32 * c;
    if (i >= pairs) continue;
    half2 result = x.normalized(own[c], own_weight[c]);
    if (i < turned) {
      const half2 with_cosine = __hmul2_rn(result, cosine[c]);
      half2 pair = x.normalized(other[c], other_weight[c]);
      if (!args.halves) pair = __lowhigh2highlow(pair);
      const half2 with_sine = __hmul2_rn(pair, sine[c]);
      const half2 less = __hsub2_rn(with_cosine, with_sine), more = __hadd2_rn(with_cosine, with_sine);
      result = args.halves ? (i < apart ? less : more) : __halves2half2(__low2half(less), __high2half(more));
    }
    to[i] = result;
  }
}

}  // namespace voltserve
