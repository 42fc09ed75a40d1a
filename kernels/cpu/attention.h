// Attention over a paged cache on the CPU (contracts/attention.h), for steps with few new tokens per request.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "contracts/decoder.h"
#include "cpu/kernels.h"

namespace voltserve::cpu {

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  float scale;
  int64_t window;  // how many positions a token sees, itself included; 0: all
  float soft_cap;  // 0: none
};

// Writes the token t's key and value, [kv_heads, dim] each, to its slot. A negative slot is written nowhere.
void write_to_cache(const PagedCache &cache, int64_t slot, const float *key, const float *value, int64_t kv_heads, int64_t dim);

// The split of a step's attention among threads. It is the same for all layers of one shape.
class PagedAttention {
 public:
  PagedAttention(const AttentionShape &shape, const PagedRequests &requests);

  // q: row t at q + t * q_stride, [heads, dim]. out: [tokens, heads, dim].
  void run(const PagedCache &cache, const float *q, int64_t q_stride, float *out, int64_t out_stride);

 private:
  // The query heads of one key/value head, for one token and one span of positions.
  struct Piece {
    int64_t token, request, kv_head, begin, end;
    int64_t hidden;  // positions from `begin` on that the token does not see
  };

  const AttentionShape shape_;
  const PagedRequests requests_;
  std::vector<Piece> pieces_;
  int64_t positions_ = 0;                   // of all pieces
  std::vector<PartialAttention> partials_;  // [pieces, q heads of a kv head]
  std::unique_ptr<float[]> partial_out_;    // [pieces, q heads of a kv head, dim]
};

}  // namespace voltserve::cpu
