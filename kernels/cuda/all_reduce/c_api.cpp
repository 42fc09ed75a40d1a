// The all-reduce's launcher as plain C, as linear/c_api.cpp's are.
#include <cstdio>
#include <exception>

#include "cuda/all_reduce/launch.h"

extern "C" {

// Sets `blocks`; on a bad problem writes why to `error` and returns 1.
int voltserve_plan_all_reduce(size_t count, int half, int ranks, int *blocks, char *error, size_t error_size) {
  try {
    *blocks = voltserve::plan_all_reduce(count, half != 0, ranks);
    return 0;
  } catch (const std::exception &failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return 1;
  }
}

int voltserve_all_reduce(const voltserve::ReduceArgs *args, int blocks, cudaStream_t stream) {
  return voltserve::launch_all_reduce(*args, blocks, stream);
}

}  // extern "C"
