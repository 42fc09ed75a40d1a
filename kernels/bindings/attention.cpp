// The attention ops (contracts/attention.h): their schemas, known on every device so that they can be traced and tested, and the
// CPU's checks. What runs on GPUs is in cuda/attention/ops.cpp.
#include <torch/csrc/stable/library.h>

#include "bindings/paged_arguments.h"
#include "cpu/attention.h"
#include "cpu/pool.h"

namespace {

using namespace voltserve;
using namespace voltserve::cpu;

// Rows [T, heads, dim] of float32, the last two dimensions dense.
void expect_rows(const char *name, const Tensor &tensor, int64_t heads, int64_t dim) {
  expect(name, tensor, kCpu, ScalarType::Float, {-1, heads, dim}, Layout::strided);
  STD_TORCH_CHECK(tensor.stride(2) == 1 && tensor.stride(1) == dim, name, ": expected [heads, D] to be dense, got ",
                  describe(tensor));
}

PagedCache cache_of(const Tensor &keys, const Tensor &values) {
  STD_TORCH_CHECK(keys.dim() == 4, "k_cache: expected [blocks, kv_heads, D, block_size], got ", describe(keys));
  const int64_t blocks = keys.size(0), heads = keys.size(1), dim = keys.size(2), page_size = keys.size(3);
  expect("k_cache", keys, kCpu, ScalarType::Float, {blocks, heads, dim, page_size}, Layout::strided);
  expect("v_cache", values, kCpu, ScalarType::Float, {blocks, heads, page_size, dim}, Layout::strided);
  expect_multiple("k_cache", "block_size", page_size, kPageUnit);
  const bool dense = keys.stride(3) == 1 && keys.stride(2) == page_size && keys.stride(1) == page_size * dim &&
                     values.stride(3) == 1 && values.stride(2) == dim && values.stride(1) == page_size * dim &&
                     keys.stride(0) == values.stride(0);
  STD_TORCH_CHECK(dense, "k_cache: expected blocks that are dense, and equal strides of k_cache and v_cache between them");
  return {static_cast<float *>(keys.mutable_data_ptr()), static_cast<float *>(values.mutable_data_ptr()), keys.stride(0),
          page_size};
}

void paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, int64_t,
                     int64_t, double scale, int64_t window, double soft_cap, Tensor out) {
  const PagedCache cache = cache_of(k_cache, v_cache);
  STD_TORCH_CHECK(q.dim() == 3, "q: expected [T, heads, D], got ", describe(q));
  const int64_t tokens = q.size(0), heads = q.size(1), kv_heads = k_cache.size(1), dim = k_cache.size(2);
  expect_multiple("q", "heads", heads, kv_heads);
  expect_multiple("q", "D", dim, kHeadUnit);
  STD_TORCH_CHECK(dim <= kMaxHeadDim, "q: expected D of at most ", kMaxHeadDim, ", got ", dim);
  expect_rows("q", q, heads, dim);
  expect_rows("out", out, heads, dim);
  STD_TORCH_CHECK(out.size(0) >= tokens, "out: expected ", tokens, " rows, got ", out.size(0));
  const PagedRequests requests = paged_requests(block_table, query_start, seq_lens, tokens);
  expect_pages(requests, k_cache.size(0), cache.page_size);
  const AttentionShape shape = {heads, kv_heads, dim, static_cast<float>(scale), window, static_cast<float>(soft_cap)};
  PagedAttention(shape, requests)
      .run(cache, static_cast<const float *>(q.const_data_ptr()), q.stride(0), static_cast<float *>(out.mutable_data_ptr()),
           out.stride(0));
}

void reshape_and_cache(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache, Tensor slots) {
  const PagedCache cache = cache_of(k_cache, v_cache);
  const int64_t kv_heads = k_cache.size(1), dim = k_cache.size(2), end = k_cache.size(0) * cache.page_size;
  expect_rows("key", key, kv_heads, dim);
  expect_rows("value", value, kv_heads, dim);
  expect("slots", slots, kCpu, ScalarType::Long, {-1});
  const int64_t tokens = slots.size(0);
  STD_TORCH_CHECK(tokens <= key.size(0) && tokens <= value.size(0), "slots: expected at most ", key.size(0), ", got ", tokens);
  const auto *to = static_cast<const int64_t *>(slots.const_data_ptr());
  for (int64_t t = 0; t < tokens; ++t) {
    STD_TORCH_CHECK(to[t] < end, "slots: expected below ", end, ", got ", to[t]);
  }
  const auto *keys = static_cast<const float *>(key.const_data_ptr()), *values = static_cast<const float *>(value.const_data_ptr());
  parallel_for(tokens, grain(2 * kv_heads * dim), [&](int64_t begin, int64_t stop) {
    for (int64_t t = begin; t < stop; ++t) {
      write_to_cache(cache, to[t], keys + t * key.stride(0), values + t * value.stride(0), kv_heads, dim);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(voltserve, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, int "
      "decode_query_len, int max_query_len, float scale, int window, float soft_cap, Tensor(a!) out) -> ()");
  m.def("reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  m.def(
      "rotate_and_cache(Tensor(a!) q, Tensor key, Tensor value, Tensor positions, Tensor cos_sin, bool halves, Tensor? q_weight, "
      "Tensor? k_weight, float eps, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(voltserve, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
}
