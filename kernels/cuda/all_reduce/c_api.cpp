// The all-reduce's launcher as plain C, as c_api.cpp's are (tools/native_all_reduce.py mirrors the structs).
#include <cstdio>
#include <exception>

#include "cuda/all_reduce/launch.h"
#include "cuda/common/c_structs.h"

extern "C" {

// The structs of this interface (common/c_structs.h).
const char *voltserve_all_reduce_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("ReduceArgs", sizeof(ReduceArgs),
               {AT(ReduceArgs, x), AT(ReduceArgs, y), AT(ReduceArgs, count), AT(ReduceArgs, half), AT(ReduceArgs, rank),
                AT(ReduceArgs, ranks), AT(ReduceArgs, copies), AT(ReduceArgs, to), AT(ReduceArgs, from), AT(ReduceArgs, epochs),
                AT(ReduceArgs, limit_ns), AT(ReduceArgs, late)});
  return text.c_str();
}

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
