// torch.ops.voltserve.paged_attention on CUDA tensors; the contract is contracts/attention.h. It allocates only in its first calls
// on a stream. It does not wait for the GPU or read its memory, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

#include "cuda/attention/launch.h"
#include "cuda/attention/plan.h"
#include "cuda/cache/binding.h"

namespace {

using namespace voltserve;

void paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, Tensor seq_lens,
                     int64_t decode_query_len, int64_t max_query_len, double scale, int64_t window, double soft_cap, Tensor out) {
  const Call call("q", q);
  STD_TORCH_CHECK(q.dim() == 3, "q: expected Half [T, H, D], got ", describe(q));
  expect_tokens("q", q, call.place, -1, -1, -1);
  expect_tokens("out", out, call.place, q.size(0), q.size(1), q.size(2));
  const CacheLayout cache = cache_layout(k_cache, v_cache, call.place, q.size(2));
  expect("seq_lens", seq_lens, call.place, ScalarType::Int, {-1});
  expect("query_start", query_start, call.place, ScalarType::Int, {seq_lens.size(0) + 1});
  expect("block_table", block_table, call.place, ScalarType::Int, {seq_lens.size(0), -1}, Layout::strided);
  STD_TORCH_CHECK(block_table.size(1) == 1 || block_table.stride(1) == 1, "block_table: expected a request's blocks side by side");
  expect_at_least("window", window, 0);
  STD_TORCH_CHECK(soft_cap >= 0, "soft_cap: expected at least 0, got ", soft_cap);
  if (q.size(0) == 0 || seq_lens.size(0) == 0 || max_query_len == 0) return;

  AttentionArgs args{};
  args.requests = seq_lens.size(0);
  args.q_heads = q.size(1);
  args.kv_heads = k_cache.size(2);
  args.head_dim = q.size(2);
  AttentionPlan plan{};
  try {
    plan = plan_attention({args.requests, static_cast<int>(q.size(0)), static_cast<int>(decode_query_len),
                           static_cast<int>(max_query_len), args.q_heads, args.kv_heads, args.head_dim, call.gpu.processors});
  } catch (const std::invalid_argument &error) {
    STD_TORCH_CHECK(false, error.what());
  }
  args.q = data<const __half>(q);
  args.out = data<__half>(out);
  args.k_cache = data<const __half>(k_cache);
  args.v_cache = data<const __half>(v_cache);
  args.block_table = data<const int>(block_table);
  args.query_start = data<const int>(query_start);
  args.seq_lens = data<const int>(seq_lens);
  args.q_stride = q.stride(0);
  args.out_stride = out.stride(0);
  args.table_stride = block_table.stride(0);
  cache.give(args);
  args.scale = scale;
  args.soft_cap = soft_cap;
  args.window = window;
  args.partial = static_cast<float *>(workspace(call, Use::scratch, plan.partial_floats));
  args.arrivals = static_cast<uint32_t *>(workspace(call, Use::mailbox, plan.arrival_words));
  check(launch_attention(args, plan, call.stream), "paged_attention");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }
