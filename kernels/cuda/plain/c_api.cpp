// The plain layers' launchers as plain C, as linear/c_api.cpp's are (tools/native_plain.py mirrors the structs).
#include "cuda/common/c_structs.h"
#include "cuda/plain/launch.h"

extern "C" {

// The structs of this interface (common/c_structs.h).
const char *voltserve_plain_structs() {
  using namespace voltserve;
  static const std::string text =
      describe("PlainNormArgs", sizeof(PlainNormArgs),
               {AT(PlainNormArgs, x), AT(PlainNormArgs, weight), AT(PlainNormArgs, residual), AT(PlainNormArgs, y),
                AT(PlainNormArgs, eps), AT(PlainNormArgs, rows), AT(PlainNormArgs, x_token), AT(PlainNormArgs, x_head),
                AT(PlainNormArgs, heads), AT(PlainNormArgs, width)}) +
      describe("PlainRotaryArgs", sizeof(PlainRotaryArgs),
               {AT(PlainRotaryArgs, positions), AT(PlainRotaryArgs, cos_sin), AT(PlainRotaryArgs, x), AT(PlainRotaryArgs, tokens),
                AT(PlainRotaryArgs, x_token), AT(PlainRotaryArgs, x_head), AT(PlainRotaryArgs, heads), AT(PlainRotaryArgs, rotated),
                AT(PlainRotaryArgs, halves)});
  return text.c_str();
}

int voltserve_plain_norm(const voltserve::PlainNormArgs *args, cudaStream_t stream) {
  return voltserve::launch_plain_norm(*args, stream);
}

int voltserve_plain_rotary(const voltserve::PlainRotaryArgs *args, cudaStream_t stream) {
  return voltserve::launch_plain_rotary(*args, stream);
}

}  // extern "C"
