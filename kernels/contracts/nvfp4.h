// The contract of torch.ops.voltserve.nvfp4_*, the same on every device. Torch-free: kernels see only these types. bindings/ and
// cuda/*/ops.cpp alone know torch, check arguments (bindings/arguments.h) and allocate.
//
// An NVFP4 matrix W [N, K] is w[n, k] = e2m1(code[n, k]) * e4m3(block_scale[n, k / g]) * row_factor[n], with
// g = group_size in {16, 32}, K a multiple of g, and row_factor a multiplier (quant/tensor.py).
//
//   nvfp4_pack(codes, block_scales, group_size) -> (packed, scales)
//       codes uint8 [N, K/2] (even column in the low nibble) and block_scales float8_e4m3fn [N, K/g], the canonical
//       layout, into the layout of the device they are on. Done once, at load; the canonical tensors can then be freed.
//   nvfp4_linear(x, packed, scales, row_factor, group_size, bias=None) -> y
//       y [..., N] = x [..., K] Wᵀ + bias. x float32, float16 or bfloat16, any strides, any leading dimensions, empty
//       ones too; y has x's dtype. bias [N] in x's dtype.
//   nvfp4_dequantize(packed, scales, row_factor, group_size, dtype) -> W
//       W [N, K] in dtype (float32, float16 or bfloat16).
//   nvfp4_moe_linear(x, packed, scales, row_factor, group_size, slots, experts, padded_slots, top_k) -> y
//       For mixtures of E experts, the E matrices packed one by one and stacked: packed [E, N', *], scales [E, N', K/g],
//       row_factor [E, N]. x [M, K] contiguous; slot s is token s / top_k going through one of its experts, and
//       y [M * top_k, N] has one row per slot, in x's dtype. slots int32 [blocks * block] lists the slots block by block, each
//       block being of one expert, experts int32 [blocks]; slots of M * top_k or more are padding. Only the first
//       padded_slots (int32 [1]) of them are looked at. Slots that are not listed have no defined row. This is what
//       vLLM's moe_align_block_size makes; block is 8, 16, 32 or 64 on a GPU and any number on a CPU.
//
// packed is uint8 [N', *] and scales float8_e4m3fn [N', K/g], where N' >= N is N rounded up to the device's row tile:
// N is the length of row_factor, K is group_size * scales.shape[1]. The order of the bytes inside is the device's own
// (cpu/layout.h, cuda/). Padding rows hold zero codes and zero scales.
//
// Numerics: code * block_scale is exact in float16 and float32 alike (|e2m1 * e4m3| <= 2688, a multiple of 2^-10). Sums
// run in float32, and row_factor is applied to the sum in float32. Error against float64: <= 1e-3 of sum |x w|
// beyond the rounding of y to its dtype.
//
// A bad argument raises RuntimeError with its name, what was expected and what was given.
#pragma once

#include <cstdint>

namespace voltserve {

// E4M3's NaN, with or without the sign (0xFF). All other scale bytes are numbers.
constexpr uint8_t kE4m3Nan = 0x7F;

// A matrix in its device's layout; see above. Pointers are device pointers.
struct Nvfp4Matrix {
  const uint8_t *packed;
  const uint8_t *scales;
  const float *row_factor;
  int64_t rows;     // N
  int64_t columns;  // K
  int group_size;
};

}  // namespace voltserve
