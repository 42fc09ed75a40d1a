// The norm's plan and launcher as plain C, as linear/c_api.cpp's are.
#include <cstdio>
#include <exception>

#include "cuda/norm/launch.h"

extern "C" {

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
