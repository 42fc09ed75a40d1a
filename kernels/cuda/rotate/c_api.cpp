// The rotation's launcher as plain C, as linear/c_api.cpp's are (tools/native_attention.py mirrors the struct).
#include "cuda/common/c_structs.h"
#include "cuda/rotate/launch.h"

extern "C" {

// The struct of this interface (common/c_structs.h).
const char *voltserve_rotate_structs() {
  using namespace voltserve;
  static const std::string text = describe("RotateArgs", sizeof(RotateArgs),
                                           {AT(RotateArgs, q),
                                            AT(RotateArgs, key),
                                            AT(RotateArgs, value),
                                            AT(RotateArgs, q_weight),
                                            AT(RotateArgs, k_weight),
                                            AT(RotateArgs, positions),
                                            AT(RotateArgs, cos_sin),
                                            AT(RotateArgs, k_cache),
                                            AT(RotateArgs, v_cache),
                                            AT(RotateArgs, slots),
                                            AT(RotateArgs, tokens),
                                            AT(RotateArgs, cached),
                                            AT(RotateArgs, q_heads),
                                            AT(RotateArgs, kv_heads),
                                            AT(RotateArgs, head_dim),
                                            AT(RotateArgs, rotated),
                                            AT(RotateArgs, q_stride),
                                            AT(RotateArgs, key_stride),
                                            AT(RotateArgs, value_stride),
                                            AT(RotateArgs, block_size),
                                            AT(RotateArgs, block_chunks),
                                            AT(RotateArgs, token_chunks),
                                            AT(RotateArgs, head_chunks),
                                            AT(RotateArgs, eps),
                                            AT(RotateArgs, halves)});
  return text.c_str();
}

int voltserve_rotate(const voltserve::RotateArgs *args, cudaStream_t stream) { return voltserve::launch_rotate(*args, stream); }

}  // extern "C"
