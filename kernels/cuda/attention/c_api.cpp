// The attention launchers as plain C, as linear/c_api.cpp's are.
#include <cstdio>
#include <exception>

#include "cuda/attention/launch.h"

extern "C" {

// Fills `plan`; on a bad problem writes why to `error` and returns 1.
int voltserve_plan_attention(const voltserve::AttentionProblem *problem, voltserve::AttentionPlan *plan, char *error,
                             size_t error_size) {
  try {
    *plan = voltserve::plan_attention(*problem);
    return 0;
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return 1;
  }
}

int voltserve_attention(const voltserve::AttentionArgs *args, const voltserve::AttentionPlan *plan, cudaStream_t stream) {
  return voltserve::launch_attention(*args, *plan, stream);
}

}  // extern "C"
