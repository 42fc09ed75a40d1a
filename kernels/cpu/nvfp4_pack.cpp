// Canonical NVFP4 (contracts/nvfp4.h) into the CPU's layout (layout.h). Runs once, at load.
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/layout.h"

namespace voltserve::cpu {

void pack(const uint8_t *codes, const uint8_t *block_scales, int64_t rows, int64_t columns, int group_size, uint8_t *packed,
          uint8_t *scales, int64_t tile_begin, int64_t tile_end) {
  const int64_t steps = columns / kStepColumns, groups = columns / group_size;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint8_t *to = packed + tile * steps * kStepBytes;
    uint8_t *to_scales = scales + tile * groups * kTileRows;
    std::memset(to, 0, steps * kStepBytes);
    std::memset(to_scales, 0, groups * kTileRows);
    for (int r = 0; r < kTileRows && tile * kTileRows + r < rows; ++r) {
      const int64_t row = tile * kTileRows + r;
      const uint8_t *from = codes + row * columns / 2;
      for (int64_t k = 0; k < columns; ++k) {
        const int column = k % kStepColumns;
        const uint8_t code = from[k / 2] >> (k % 2 * 4) & 0xF;
        to[k / kStepColumns * kStepBytes + step_byte(r, column)] |= code << (column / 4 * 4);
      }
      for (int64_t g = 0; g < groups; ++g) to_scales[g * kTileRows + r] = block_scales[row * groups + g];
    }
  }
}

}  // namespace voltserve::cpu
