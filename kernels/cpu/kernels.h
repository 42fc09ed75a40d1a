// The CPU's kernels as the bindings see them: one table per instruction set, each filled by a file of its own.
#pragma once

#include <cstdint>

#include "contracts/attention.h"
#include "contracts/fp8.h"
#include "contracts/gdn.h"
#include "contracts/nvfp4.h"

namespace voltserve::cpu {

// A 16-bit matrix [N, K], row-major; K a multiple of kLinear16Columns.
struct Linear16 {
  const uint16_t *weight;
  bool bfloat16;  // else float16
  int64_t rows;
  int64_t columns;
};
constexpr int kLinear16Columns = 16;

// Gated DeltaNet: channels and key dimensions are multiples of kGdnWidth, the latter at most kMaxGdnDim.
constexpr int kGdnWidth = 16;
constexpr int kMaxGdnDim = 256;

// One key/value head of one request's pages: page p's keys are at keys + pages[p] * page_stride, its values likewise.
struct PagedHead {
  const float *keys, *values;
  const int32_t *pages;
  int64_t page_stride, page_size, dim;
};
constexpr int64_t kSpan = 512;  // the most positions of one call of attend; it may cross pages

// Positions begin .. end, of which the first `hidden` are not seen; begin is a multiple of kPageUnit.
struct Span {
  int64_t begin, end, hidden;
};

// The softmax over a span: the highest score, and the sum of exp(score - highest).
struct PartialAttention {
  float highest, sum;
};

struct Kernels {
  const char *isa;
  bool (*supported)();  // by the machine that runs this

  // Tiles tile_begin..tile_end of y [m, N] = x [m, K] Wᵀ + bias, everything float32 and row-major; bias may be null.
  void (*linear)(const Nvfp4Matrix &w, const float *x, int64_t m, const float *bias, float *y, int64_t tile_begin,
                 int64_t tile_end);

  // Tiles tile_begin..tile_end of W [N, K], float32, row-major.
  void (*dequantize)(const Nvfp4Matrix &w, float *out, int64_t tile_begin, int64_t tile_end);

  // The same two for FP8 weights, in the layout of fp8_linear.inl.
  void (*fp8_linear)(const Fp8Matrix &w, const float *x, int64_t m, const float *bias, float *y, int64_t tile_begin,
                     int64_t tile_end);
  void (*fp8_dequantize)(const Fp8Matrix &w, float *out, int64_t tile_begin, int64_t tile_end);

  // Columns row_begin..row_end of y [m, N] = x [m, K] Wᵀ, float32.
  void (*linear16)(const Linear16 &w, const float *x, int64_t m, float *y, int64_t row_begin, int64_t row_end);

  // See layers.inl.
  void (*rms_norm)(const float *x, float *residual, const float *weight, float eps, float *y, int64_t m, int64_t n);
  void (*silu_and_mul)(const float *x, float *y, int64_t m, int64_t n);

  // out [q_heads, dim] = sum over the span's positions of exp(score - highest) value, score = scale q . key, for the query heads
  // q [q_heads, dim]. With a soft cap c, not 0, score is c tanh(score / c).
  void (*attend)(const PagedHead &head, const float *q, int64_t q_heads, float scale, float soft_cap, const Span &span,
                 PartialAttention *partial, float *out);
  void (*norm_and_rotate)(float *x, int64_t heads, int64_t dim, const float *norm, float eps, const float *cos_sin);

  // See gdn.inl.
  void (*causal_conv1d)(const Conv1d<float> &conv, const Requests &requests, int64_t channel_begin, int64_t channel_end);
  void (*gated_delta_rule)(const DeltaRule<float> &rule, const Requests &requests, int64_t pair_begin, int64_t pair_end);
};

extern const Kernels kAvx512;
extern const Kernels kAvx2;
extern const Kernels kPortable;

// All tables compiled in, fastest first.
#ifdef __x86_64__
inline constexpr const Kernels *kAll[] = {&kAvx512, &kAvx2, &kPortable};
#else
inline constexpr const Kernels *kAll[] = {&kPortable};
#endif

// The table that the ops use: the fastest that this machine supports, unless a test chose another.
const Kernels *&chosen();

// Tiles tile_begin..tile_end of the canonical codes [N, K/2] and scales [N, K/g], into the layout of layout.h.
void pack(const uint8_t *codes, const uint8_t *block_scales, int64_t rows, int64_t columns, int group_size, uint8_t *packed,
          uint8_t *scales, int64_t tile_begin, int64_t tile_end);

}  // namespace voltserve::cpu
