// The plain layers' launchers as plain C, as linear/c_api.cpp's are.
#include "cuda/plain/launch.h"

extern "C" {

int voltserve_plain_norm(const voltserve::PlainNormArgs *args, cudaStream_t stream) {
  return voltserve::launch_plain_norm(*args, stream);
}

int voltserve_plain_rotary(const voltserve::PlainRotaryArgs *args, cudaStream_t stream) {
  return voltserve::launch_plain_rotary(*args, stream);
}

}  // extern "C"
