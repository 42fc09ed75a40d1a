// The CPU's kernels as bindings.cpp sees them: one table per instruction set, each filled by a file of its own.
#pragma once

#include <cstdint>

#include "../include/nvfp4.h"

namespace voltserve::cpu {

struct Kernels {
  const char* isa;
  bool (*supported)();  // on the machine that runs this

  // Tiles tile_begin..tile_end of y [m, N] = x [m, K] Wᵀ + bias, everything float32 and row-major; bias may be null.
  void (*linear)(const Nvfp4Matrix& w, const float* x, int64_t m, const float* bias, float* y, int64_t tile_begin,
                 int64_t tile_end);

  // Tiles tile_begin..tile_end of W [N, K], float32, row-major.
  void (*dequantize)(const Nvfp4Matrix& w, float* out, int64_t tile_begin, int64_t tile_end);
};

extern const Kernels kAvx512;
extern const Kernels kAvx2;
extern const Kernels kPortable;

// Those compiled in, fastest first.
#ifdef __x86_64__
inline constexpr const Kernels* kAll[] = {&kAvx512, &kAvx2, &kPortable};
#else
inline constexpr const Kernels* kAll[] = {&kPortable};
#endif

// Tiles tile_begin..tile_end of the canonical codes [N, K/2] and scales [N, K/g], into the layout of layout.h.
void pack(const uint8_t* codes, const uint8_t* block_scales, int64_t rows, int64_t columns, int group_size,
          uint8_t* packed, uint8_t* scales, int64_t tile_begin, int64_t tile_end);

}  // namespace voltserve::cpu
