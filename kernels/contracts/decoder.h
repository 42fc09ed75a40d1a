// The contract of the two ops that run all decoder layers of a Llama or Qwen model over a step's tokens, on the CPU. Torch-free.
//
// A decoding step of a small model is a few hundred operations of a few microseconds each. Calling them one by one takes longer
// than computing them. Here a step is one call, and only norms, SiLU and attention lie between two GEMMs.
//
//   decoder_make(tensors, final_norm, group_size, heads, kv_heads, eps, scale) -> decoder
//       Called once per model. `tensors` has kLayerTensors per layer, in the order of LayerTensor; weights are packed by nvfp4_pack.
//       A bias, or a norm of q and k, that the model lacks is an empty tensor. The decoder lives as long as the process.
//   decoder_step(decoder, x, positions, cos_sin, caches, slots, block_table, query_start, seq_lens) -> y
//       x [M, hidden] float32, the tokens' embeddings; overwritten. y [M, hidden], normed by final_norm. For each layer:
//           r = x              or r + x from the second on         (r, the residual stream)
//           q, k, v = norm(r, input_norm) Wqkvᵀ + b;  q, k <- norm by head, where there is one, then rotated
//           k, v into the cache;  a = softmax(scale q Kᵀ) V over the request's positions up to the token's own
//           r = r + a Woᵀ
//           x = (silu(gate) * up) Wdownᵀ               gate, up = norm(r, post_norm) Wgate_upᵀ
//       positions int64 [M]; cos_sin float32 [P, D], of each position the cosines then the sines of D / 2 angles: element i of a
//       head is rotated with element i + D / 2.
//       The batch is R requests, of which query_start int32 [R + 1] says where tokens begin, seq_lens int32 [R] how many positions
//       they have with these tokens, and block_table int32 [R, B] which pages. slots int64 [M]: where a token's k and v go,
//       page * page_size + offset; a negative slot is written nowhere.
//       caches: one per layer, float32 [pages, 2, kv_heads, page_size, D]: a page's keys, then its values. In it the keys of one head
//       lie as [D, page_size], its values as [page_size, D] (contracts/attention.h).
//
// D is a multiple of kHeadUnit up to kMaxHeadDim, page_size a multiple of kPageUnit. Everything is computed in float32.
// A bad argument raises RuntimeError with its name, what was expected and what was given.
#pragma once

#include <cstdint>

#include "contracts/attention.h"
#include "contracts/nvfp4.h"

namespace voltserve {

enum LayerTensor {
  kInputNorm,
  kQkvPacked,
  kQkvScales,
  kQkvFactor,
  kQkvBias,
  kQueryNorm,
  kKeyNorm,
  kOutPacked,
  kOutScales,
  kOutFactor,
  kPostNorm,
  kGateUpPacked,
  kGateUpScales,
  kGateUpFactor,
  kDownPacked,
  kDownScales,
  kDownFactor,
  kLayerTensors,
};

struct DecoderLayer {
  const float *input_norm, *qkv_bias, *query_norm, *key_norm, *post_norm;  // bias and the norms of q and k may be null
  Nvfp4Matrix qkv, out, gate_up, down;
};

struct DecoderShape {
  int64_t hidden, heads, kv_heads, dim, intermediate;
  float eps, scale;

  int64_t qkv() const { return (heads + 2 * kv_heads) * dim; }
};

// One layer's cache: page p's keys are at keys + p * page_stride, its values likewise.
struct PagedCache {
  float *keys, *values;
  int64_t page_stride, page_size;
};

// A step's requests; see above.
struct PagedRequests {
  int64_t count, pages_each;
  const int32_t *block_table, *query_start, *seq_lens;
};

// A step's tokens; see above.
struct StepBatch {
  int64_t tokens;
  PagedRequests requests;
  const int64_t *positions, *slots;
  const float *cos_sin;
};

}  // namespace voltserve
