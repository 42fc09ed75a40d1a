// Arguments of silu(gate) * up. Plain C++ without CUDA or torch headers, as linear/args.h.
#pragma once

struct __half;

namespace voltserve {

// y[t][i] = silu(x[t][i]) * x[t][n + i]: x fp16 [m, 2 n], y fp16 [m, n], both contiguous on 16-byte boundaries, n a multiple of 8.
struct SiluArgs {
  const __half *x;
  __half *y;
  int m, n;
};

}  // namespace voltserve
