// y[t][i] = silu(x[t][i]) * x[t][n + i], the gate of a feed-forward layer, with the next product's weights read ahead (ahead.h).
//
// silu in fp32, rounded to fp16 before the product, as vLLM's kernel and PyTorch round it: steps are the same text with either. 16
// bytes of y a thread. The first blocks do that; those beyond `blocks` read ahead, and none waits for another.
#pragma once

#include "ahead.cuh"
#include "silu_and_mul.h"

namespace voltserve {

constexpr int kSiluThreads = 128, kSiluChunk = 8;

__device__ inline half2 silu_and_mul(half2 gate, half2 up) {
  auto silu = [](float x) { return x / (1 + expf(-x)); };
  const float2 x = __half22float2(gate);
  return __hmul2(__floats2half2_rn(silu(x.x), silu(x.y)), up);
}

// Grid: `blocks` for chunks of all tokens, and more to read ahead.
__global__ void __launch_bounds__(kSiluThreads) silu_and_mul_kernel(const SiluArgs args, const Ahead ahead, const unsigned blocks) {
  if (blockIdx.x >= blocks) return read_ahead(ahead, blockIdx.x - blocks, gridDim.x - blocks);
  const int chunks = args.n / kSiluChunk, i = blockIdx.x * kSiluThreads + threadIdx.x, token = i / chunks;
  if (token >= args.m) return;
  const uint4 *const x = reinterpret_cast<const uint4 *>(args.x) + i + static_cast<size_t>(token) * chunks;
  uint4 gate = __ldg(x);
  const uint4 up = __ldg(x + chunks);
  gate.x = as_bits(silu_and_mul(as_half2(gate.x), as_half2(up.x)));
  gate.y = as_bits(silu_and_mul(as_half2(gate.y), as_half2(up.y)));
  gate.z = as_bits(silu_and_mul(as_half2(gate.z), as_half2(up.z)));
  gate.w = as_bits(silu_and_mul(as_half2(gate.w), as_half2(up.w)));
  reinterpret_cast<uint4 *>(args.y)[i] = gate;
}

}  // namespace voltserve
