// The SiLU launcher as plain C, as linear/c_api.cpp's are (tools/native.py mirrors the struct).
#include "cuda/common/c_structs.h"
#include "cuda/silu/launch.h"

extern "C" {

// The struct of this interface (common/c_structs.h).
const char *voltserve_silu_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("SiluArgs", sizeof(SiluArgs), {AT(SiluArgs, x), AT(SiluArgs, y), AT(SiluArgs, m), AT(SiluArgs, n)});
  return text.c_str();
}

int voltserve_silu_and_mul(const voltserve::SiluArgs *args, cudaStream_t stream) {
  return voltserve::launch_silu_and_mul(*args, stream);
}

}  // extern "C"
