// The contract of torch.ops.voltserve.fp8_*, the same on every device. Torch-free, as contracts/nvfp4.h.
//
// An FP8 matrix W [N, K] is w[n, k] = e4m3(code[n, k]) * scale[n, k / g]. g = group_size is K for one scale per row (a scale per
// tensor is spread over the rows), or 128 for blocks of 128 columns. K is a multiple of 16. Activations stay in their 16 or 32 bits.
//
//   fp8_pack(codes, scales, group_size) -> (packed, packed_scales)
//       codes float8_e4m3fn [N, K] and scales float32 [N, ceil(K / g)], the canonical layout, into the layout of the device they are
//       on. Done once, at load. A NaN among the codes is refused.
//   fp8_linear(x, packed, packed_scales, rows, group_size, bias=None) -> y
//       y [..., N] = x [..., K] Wᵀ + bias, N = rows. x and y as for nvfp4_linear.
//   fp8_dequantize(packed, packed_scales, rows, columns, group_size, dtype) -> W
//       W [N, K] = [rows, columns] in dtype.
//
// packed is uint8 [N', K'] and packed_scales float32 [N', ceil(K / g)], where N' and K' are N and K rounded up to the device's tile.
// Their order inside is the device's own. Padding is zero.
//
// Numerics: a code is exact in float16 and float32 alike. Sums run in float32; scales are applied to sums in float32. Error against
// float64: <= 1e-3 of sum |x w| beyond the rounding of y to its dtype. Blocks of 128 on a GPU go through fp16 weights, rounded once.
//
// A bad argument raises RuntimeError with its name, what was expected and what was given.
#pragma once

#include <cstdint>

namespace voltserve {

constexpr int kFp8Columns = 16;  // K is a multiple
constexpr int kFp8Block = 128;   // columns per scale, where there are several per row

// A matrix in its device's layout; see above. Pointers are device pointers.
struct Fp8Matrix {
  const uint8_t *packed;
  const float *scales;
  int64_t rows;     // N
  int64_t columns;  // K
  int64_t group_size;

  int64_t groups() const { return (columns + group_size - 1) / group_size; }
};

}  // namespace voltserve
