// The launchers as plain C, for tools that load the shared library without torch. tools/c_structs.py reads the structs from
// args.h and plan.h. Launchers return a cudaError_t, 0 for success.
#include <cstdio>
#include <exception>

#include "cuda/linear/launch.h"
#include "cuda/common/layout.cuh"
#include "cuda/linear/plan.h"

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

// A code's bits in its word of the packed layout, and a scale's byte (common/layout.cuh); not error codes.
uint32_t voltserve_place_code(uint32_t code, int column) { return voltserve::place_code(code, column); }
uint32_t voltserve_place_scale(uint32_t e4m3) { return voltserve::place_scale(e4m3); }

int voltserve_linear(const voltserve::LinearArgs *args, int group, const voltserve::Plan *plan, cudaStream_t stream) {
  return voltserve::launch_linear(*args, group, *plan, stream);
}

int voltserve_repack(const uint8_t *codes, const uint8_t *scales, uint4 *packed, uint8_t *packed_scales, int *first_nan, int n,
                     int k, int group, cudaStream_t stream) {
  return voltserve::launch_repack(codes, scales, packed, packed_scales, first_nan, n, k, group, stream);
}

int voltserve_dequantize(const uint4 *packed, const uint8_t *packed_scales, const float *row_factor, __half *out, int first_row,
                         int rows, int k, int group, cudaStream_t stream) {
  return voltserve::launch_dequantize(packed, packed_scales, row_factor, out, first_row, rows, k, group, stream);
}

}  // extern "C"
