// The contract of the two ops of a Gated DeltaNet layer (arXiv 2412.06464, as in Qwen3-Next and Qwen3.5), the same on every
// device. They are all that such a layer does between its input and output projections, except for the gated norm.
//
// A step has T tokens of R requests in order: tokens starts[r] .. starts[r + 1] - 1 belong to request r. Without `starts` every request
// has one token, R = T. Then launches depend on no tensor's contents except slots, so they can be captured in a graph.
// Request r's state lies in slot slots[r] of the caches. A negative slot stands for no request: its y is zero, and no cache is
// touched. Where `continued` is given and false, the request starts anew, from zeros.
//
//   causal_conv1d(x, weight, state, slots, starts=None, continued=None) -> y
//       y[t, c] = silu(sum_{j < 4} weight[c, j] * x[t - 3 + j, c]), x of t < 0 being the request's former tokens.
//       x [T, C], rows any distance apart; weight [C, 4]; state [S, 3, C], the last three inputs, oldest first: read and updated;
//       y [T, C]. All of one dtype.
//   gated_delta_rule(qkv, a, b, a_log, dt_bias, state, slots, starts, continued, key_heads, out) -> ()
//       For each value head h, with its key head h * key_heads / value_heads, and S [V, K] its state:
//           q = l2(q_t) / sqrt(K)     k = l2(k_t)     l2(x) = x / sqrt(sum x² + 1e-6)
//           S <- exp(-exp(a_log) * softplus(a_t + dt_bias)) S
//           S <- S + sigmoid(b_t) (v_t - S k) kᵀ
//           out[t, h] = S q
//       qkv [T, 2 key_heads K + value_heads V], the heads' q, then k, then v, as causal_conv1d returns them; a, b [T, value_heads];
//       a_log, dt_bias float32 [value_heads]; state float32 [S, value_heads, V, K]; out [T, value_heads, V].
//       Of one dtype: qkv, a, b, out. K = V.
//
// Any stride is allowed for slots (a column of a block table) and for a state's slots (pages of a cache). So it is for rows of x,
// qkv, a and b.
//
// dtype: float32 on the CPU, float16 on a GPU. Everything is computed in float32 and rounded once, to out. The state is never
// rounded to less. softplus(x) is x above 20, where the two differ by less than float32's last place.
//
// A bad argument raises RuntimeError with its name, what was expected and what was given.
#pragma once

#include <cstdint>

namespace voltserve {

inline constexpr int kConvTaps = 4;

// The requests of a step, as above. starts and continued may be null.
struct Requests {
  const int32_t *slots;
  int64_t slot_stride;
  const int32_t *starts;
  const bool *continued;
  int64_t count;
};

// Strides are in elements.
template <class Number>
struct Conv1d {
  const Number *x;
  const Number *weight;
  Number *state;
  Number *y;
  int64_t x_stride;
  int64_t state_stride;
  int64_t channels;
};

template <class Number>
struct DeltaRule {
  const Number *qkv;
  const Number *a;
  const Number *b;
  const float *a_log;
  const float *dt_bias;
  float *state;
  Number *out;
  int64_t qkv_stride;
  int64_t a_stride;
  int64_t b_stride;
  int64_t state_stride;
  int key_heads;
  int value_heads;
  int dim;  // K = V
};

}  // namespace voltserve
