// How a CPU holds an NVFP4 matrix (contracts/nvfp4.h): one layout for every instruction set. Decoding needs no shuffle across 16-byte
// lanes.
//
// A tile has 16 rows; its columns come in steps of 8. A step is 64 bytes: four 16-byte lanes of four rows each. In lane l, byte
// 8 * h + 2 * i + b belongs to row 4 * l + i. Its low nibble holds column 2 * h + b, its high nibble column 4 + 2 * h + b
// (h, b in {0, 1}; i in 0 .. 3):
//
//   lane l:  h=0: | r0 c0/c4 | r0 c1/c5 | r1 c0/c4 | r1 c1/c5 | r2 .. | r3 .. |   h=1: | r0 c2/c6 | r0 c3/c7 | ...
//
// Decoding turns each byte into the two bytes of a bfloat16, which can hold every E2M1 value. Then each 32-bit element holds two
// columns of one row. The masked high half is one float32; the low half, shifted up, is the other.
//
// packed: tiles one after another, each K/8 steps. scales: tiles one after another, each K/g times 16 bytes, one per row.
#pragma once

#include <cstdint>

namespace voltserve::cpu {

constexpr int kTileRows = 16;
constexpr int kStepColumns = 8;
constexpr int kNibbleColumns = kStepColumns / 2;  // in the low nibbles of a step, and as many in the high ones
constexpr int kStepBytes = kTileRows * kStepColumns / 2;

inline int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The byte of a step that holds column `column` (0..7) of row `row` (0..15); columns 4..7 are in its high nibble.
inline int step_byte(int row, int column) {
  const int pair = column % 4;
  return row / 4 * 16 + pair / 2 * 8 + row % 4 * 2 + pair % 2;
}

}  // namespace voltserve::cpu
