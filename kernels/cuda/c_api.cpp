// The CUDA launchers as plain C, for tools and tests that load the shared library without torch's headers (tools/native.py
// mirrors the structs). Launchers return a cudaError_t, 0 for success.
#include <cstdio>
#include <exception>

#include "launch.h"
#include "layout.cuh"
#include "plan.h"

extern "C" {

// Fills `plan`; on a bad problem writes why to `error` and returns 1.
int voltserve_plan(const voltserve::Problem *problem, voltserve::Plan *plan, char *error, size_t error_size) {
  try {
    *plan = voltserve::plan(*problem);
    return 0;
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return 1;
  }
}

// The name and sizes of a variant (plan.h), or null past the last.
const voltserve::Shape *voltserve_shape(int variant) {
  const bool known = variant >= 0 && variant < static_cast<int>(voltserve::Variant::count);
  return known ? &voltserve::shape(static_cast<voltserve::Variant>(variant)) : nullptr;
}

// A code's bits in its word of the packed layout (layout.cuh); not an error code.
uint32_t voltserve_place_code(uint32_t code, int column) { return voltserve::place_code(code, column); }

int voltserve_linear(const voltserve::LinearArgs *args, int group, const voltserve::Plan *plan, cudaStream_t stream) {
  return voltserve::launch_linear(*args, group, *plan, stream);
}

int voltserve_repack(const uint8_t *codes, const uint8_t *scales, uint4 *packed, uint8_t *packed_scales, int *first_nan,
                     int n, int k, int group, cudaStream_t stream) {
  return voltserve::launch_repack(codes, scales, packed, packed_scales, first_nan, n, k, group, stream);
}

int voltserve_dequantize(const uint4 *packed, const uint8_t *packed_scales, const float *row_factor, __half *out,
                         int first_row, int rows, int k, int group, cudaStream_t stream) {
  return voltserve::launch_dequantize(packed, packed_scales, row_factor, out, first_row, rows, k, group, stream);
}

}  // extern "C"
