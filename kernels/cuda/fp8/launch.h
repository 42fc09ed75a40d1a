// Packing FP8 weights, once, at load. Products and fp16 copies: cuda/linear/launch.h, with group 0 or 128.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace voltserve {

// Codes [n, k] (E4M3) into the packed layout; *nan_row as in repack.cuh.
cudaError_t launch_fp8_repack(const uint8_t *codes, uint4 *packed, int *nan_row, int n, int k, cudaStream_t stream);

// Scales [n, k / group], group 0 or 128, into row factors [n rounded up to 32] and, for blocks, the tiles' scales.
cudaError_t launch_fp8_scales(const float *scales, float *row_factor, __half *tile_scales, int n, int k, int group,
                              cudaStream_t stream);

}  // namespace voltserve
