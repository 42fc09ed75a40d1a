// The norm's plan and launcher as plain C, as c_api.cpp's are (tools/native_norm.py mirrors the structs).
#include <cstdio>
#include <exception>

#include "cuda/common/c_structs.h"
#include "cuda/norm/launch.h"

extern "C" {

// The structs of this interface (common/c_structs.h); NormArgs holds ReduceArgs, which its own interface describes.
const char *voltserve_norm_structs() {
  using namespace voltserve;
  static const std::string text = describe("NormArgs", sizeof(NormArgs),
                                           {AT(NormArgs, reduce), AT(NormArgs, residual), AT(NormArgs, weight), AT(NormArgs, rows),
                                            AT(NormArgs, hidden), AT(NormArgs, eps)}) +
                                  describe("NormPlan", sizeof(NormPlan), {AT(NormPlan, vectors), AT(NormPlan, threads)});
  return text.c_str();
}

// Sets `plan`; on a bad problem writes why to `error` and returns 1.
int voltserve_plan_norm(int rows, int hidden, int ranks, voltserve::NormPlan *plan, char *error, size_t error_size) {
  try {
    *plan = voltserve::plan_norm(rows, hidden, ranks);
    return 0;
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return 1;
  }
}

int voltserve_norm(const voltserve::NormArgs *args, const voltserve::NormPlan *plan, cudaStream_t stream) {
  return voltserve::launch_norm(*args, *plan, stream);
}

}  // extern "C"
