// Arguments of the plain layers' kernels. Plain C++ without CUDA or torch headers, as linear/args.h.
#pragma once

#include <cstdint>

struct __half;

namespace voltserve {

// y = norm(x) * weight, one row per block. Row r of x lies at r / heads * x_token + r % heads * x_head; rows of y and residual are
// dense. With a residual: residual += x, and y is the norm of the sum. width is a multiple of 8 of at most kPlainNormWidth.
struct PlainNormArgs {
  const __half *x, *weight;
  __half *residual, *y;  // residual may be null
  float eps;
  int64_t rows, x_token, x_head;
  int heads, width;
};

// Rotates each head of x in place: head h of token t lies at t * x_token + h * x_head.
struct PlainRotaryArgs {
  const int64_t *positions;
  const __half *cos_sin;  // [any, rotated]: rotated / 2 cosines, then as many sines
  __half *x;
  int64_t tokens, x_token, x_head;
  int heads, rotated;
  bool halves;  // angle i rotates dimensions i and i + rotated / 2, else 2 i and 2 i + 1
};

constexpr int kPlainNormWidth = 16384;

}  // namespace voltserve
