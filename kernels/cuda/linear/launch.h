// The launchers of the linear kernels. Each only launches, on the stream given, and returns the launch's error.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/linear/args.h"
#include "cuda/linear/plan.h"

namespace voltserve {

// y = x W^T (linear.cuh), with the workspace that the plan asks for.
cudaError_t launch_linear(const LinearArgs &args, int group, const Plan &plan, cudaStream_t stream);

// Canonical codes [n, k/2] and scales [n, k/group] into the packed layout; *first_nan as in repack.cuh.
cudaError_t launch_repack(const uint8_t *codes, const uint8_t *scales, uint4 *packed, uint8_t *packed_scales, int *first_nan, int n,
                          int k, int group, cudaStream_t stream);

// Rows first_row .. first_row + rows - 1 of W as fp16, `out` [rows, k] (dequantize.cuh). first_row: a multiple of 32.
cudaError_t launch_dequantize(const uint4 *packed, const uint8_t *packed_scales, const float *row_factor, __half *out,
                              int first_row, int rows, int k, int group, cudaStream_t stream);

}  // namespace voltserve
