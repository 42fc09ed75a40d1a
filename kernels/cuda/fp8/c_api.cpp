// The launchers as plain C, for tools that load the shared library without torch; see linear/c_api.cpp for products.
#include "cuda/common/layout8.cuh"
#include "cuda/fp8/launch.h"

extern "C" {

// A code's bits in its word of the packed layout, and a pair's two fp16 numbers (common/layout8.cuh); not error codes.
uint32_t voltserve_place_fp8(uint32_t code, int column) { return voltserve::place_fp8(code, column); }
uint32_t voltserve_fp8_pair(uint32_t word, int pair) { return voltserve::fp8_pair(word, pair); }

int voltserve_fp8_repack(const uint8_t *codes, uint4 *packed, int *nan_row, int n, int k, cudaStream_t stream) {
  return voltserve::launch_fp8_repack(codes, packed, nan_row, n, k, stream);
}

int voltserve_fp8_scales(const float *scales, float *row_factor, __half *tile_scales, int n, int k, int group,
                         cudaStream_t stream) {
  return voltserve::launch_fp8_scales(scales, row_factor, tile_scales, n, k, group, stream);
}

}  // extern "C"
