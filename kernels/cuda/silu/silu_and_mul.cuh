// The gate of a feed-forward layer: y[t][i] = silu(x[t][i]) * x[t][n + i].
//
// silu is computed in fp32 and rounded to fp16 before the multiplication, as vLLM's kernel and PyTorch do, so texts are the same with
// either. A thread writes 16 bytes of y.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/layout.cuh"
#include "cuda/silu/args.h"

namespace voltserve {

constexpr int kSiluThreads = 128, kSiluChunk = 8;

__device__ inline half2 silu_and_mul(half2 gate, half2 up) {
  auto silu = [](float x) { return x / (1 + expf(-x)); };
  const float2 x = __half22float2(gate);
  return __hmul2(__floats2half2_rn(silu(x.x), silu(x.y)), up);
}

// Grid: one thread per 16-byte chunk of y.
__global__ void __launch_bounds__(kSiluThreads) silu_and_mul_kernel(const SiluArgs args) {
  allow_next_launch();
  const int chunks = args.n / kSiluChunk, i = blockIdx.x * kSiluThreads + threadIdx.x, token = i / chunks;
  wait_for_previous();
  if (token >= args.m) return;
  const uint4 *const x = reinterpret_cast<const uint4 *>(args.x) + i + static_cast<size_t>(token) * chunks;
  uint4 gate = load_written(x);
  const uint4 up = load_written(x + chunks);
  gate.x = as_bits(silu_and_mul(as_half2(gate.x), as_half2(up.x)));
  gate.y = as_bits(silu_and_mul(as_half2(gate.y), as_half2(up.y)));
  gate.z = as_bits(silu_and_mul(as_half2(gate.z), as_half2(up.z)));
  gate.w = as_bits(silu_and_mul(as_half2(gate.w), as_half2(up.w)));
  reinterpret_cast<uint4 *>(args.y)[i] = gate;
}

}  // namespace voltserve
