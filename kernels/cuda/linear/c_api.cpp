// The CUDA launchers as plain C, for tools and tests that load the shared library without torch's headers (tools/native.py
// mirrors the structs). Launchers return a cudaError_t, 0 for success.
#include <cstdio>
#include <exception>

#include "cuda/common/c_structs.h"
#include "cuda/linear/launch.h"
#include "cuda/common/layout.cuh"
#include "cuda/linear/plan.h"

extern "C" {

// The structs of this interface (common/c_structs.h).
const char *voltserve_linear_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("Problem", sizeof(Problem),
               {AT(Problem, m), AT(Problem, n), AT(Problem, k), AT(Problem, group), AT(Problem, arch), AT(Problem, processors),
                AT(Problem, experts)}) +
      describe(
          "Plan", sizeof(Plan),
          {AT(Plan, path), AT(Plan, variant), AT(Plan, blocks), AT(Plan, tiles), AT(Plan, workspace_words), AT(Plan, reason)}) +
      describe("Shape", sizeof(Shape),
               {AT(Shape, name), AT(Shape, tokens), AT(Shape, rows), AT(Shape, threads), AT(Shape, stage_tiles),
                AT(Shape, blocks_per_processor)}) +
      describe("LinearArgs", sizeof(LinearArgs),
               {AT(LinearArgs, x), AT(LinearArgs, codes), AT(LinearArgs, scales), AT(LinearArgs, row_factor), AT(LinearArgs, bias),
                AT(LinearArgs, y), AT(LinearArgs, workspace), AT(LinearArgs, m), AT(LinearArgs, n), AT(LinearArgs, k),
                AT(LinearArgs, x_stride), AT(LinearArgs, slots), AT(LinearArgs, experts), AT(LinearArgs, padded_slots),
                AT(LinearArgs, top_k)});
  return text.c_str();
}

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
