// torch.ops.voltserve.paged_attention, reshape_and_cache and rotate_and_cache on CUDA tensors; the contract is include/attention.h. None
// allocates after its first calls on a stream, waits for the GPU, or reads what is on it: all can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>

#include "attention_launch.h"
#include "attention_plan.h"
#include "binding.h"

namespace {

using namespace voltserve;

const __half* halves(const Tensor& tensor) { return reinterpret_cast<const __half*>(tensor.data_ptr()); }
__half* written_halves(const Tensor& tensor) { return reinterpret_cast<__half*>(tensor.data_ptr()); }

// [tokens, heads, D] with heads and D together and every token 16-byte aligned; -1: any length.
void expect_tokens(const char* name, const Tensor& tensor, Place place, int64_t tokens, int64_t heads, int64_t head_dim) {
  expect(name, tensor, place, ScalarType::Half, {tokens, heads, head_dim}, Layout::strided);
  const int64_t length = tensor.size(1) * tensor.size(2);
  const bool together = tensor.stride(2) == 1 && (tensor.size(1) < 2 || tensor.stride(1) == tensor.size(2));
  const bool apart = tensor.size(0) < 2 || (tensor.stride(0) % 8 == 0 && tensor.stride(0) >= length);
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  STD_TORCH_CHECK(tensor.size(0) == 0 || (together && apart && aligned), name,
                  ": expected heads side by side and tokens on 16-byte boundaries, got strides ", tensor.stride(0), ", ",
                  tensor.stride(1), ", ", tensor.stride(2));
}

// Strides of a cache in 16 bytes.
struct CacheLayout {
  int block_size, block_chunks, token_chunks, head_chunks;

  template <class Args>
  void give(Args& args) const {
    args.block_size = block_size;
    args.block_chunks = block_chunks;
    args.token_chunks = token_chunks;
    args.head_chunks = head_chunks;
  }
};

CacheLayout cache_layout(const Tensor& k_cache, const Tensor& v_cache, Place place, int64_t head_dim) {
  expect("k_cache", k_cache, place, ScalarType::Half, {-1, -1, -1, head_dim}, Layout::strided);
  expect("v_cache", v_cache, place, ScalarType::Half, shape_of(k_cache), Layout::strided);
  expect_multiple("k_cache", "its block size", k_cache.size(1), 8);
  STD_TORCH_CHECK(k_cache.size(1) < 1 << 14, "k_cache: expected blocks of less than ", 1 << 14, " tokens, got ", k_cache.size(1));
  for (int64_t d = 0; d < 4; ++d) {
    const int64_t stride = k_cache.stride(d);
    STD_TORCH_CHECK(d == 3 ? stride == 1 : stride % 8 == 0, "k_cache: expected strides that are multiples of 8, and 1 at last, got ",
                    stride, " in dimension ", d);
    STD_TORCH_CHECK(v_cache.stride(d) == stride, "v_cache: expected k_cache's strides, got ", v_cache.stride(d), " for ", stride,
                    " in dimension ", d);
  }
  STD_TORCH_CHECK(k_cache.size(0) * (k_cache.stride(0) / 8) < int64_t{1} << 31, "k_cache: expected less than 32 GiB from its first "
                  "block to its last, got ", k_cache.size(0), " blocks ", 2 * k_cache.stride(0), " bytes apart");
  expect_aligned("k_cache", k_cache);
  expect_aligned("v_cache", v_cache);
  return {static_cast<int>(k_cache.size(1)), static_cast<int>(k_cache.stride(0) / 8), static_cast<int>(k_cache.stride(1) / 8),
          static_cast<int>(k_cache.stride(2) / 8)};
}

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
  } catch (const std::invalid_argument& error) {
    STD_TORCH_CHECK(false, error.what());
  }
  args.q = halves(q);
  args.out = written_halves(out);
  args.k_cache = halves(k_cache);
  args.v_cache = halves(v_cache);
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
  args.partial = static_cast<float*>(workspace(call, Use::scratch, plan.partial_floats));
  args.arrivals = static_cast<uint32_t*>(workspace(call, Use::mailbox, plan.arrival_words));
  check(launch_attention(args, plan, call.stream), "paged_attention");
}

void reshape_and_cache(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache, Tensor slots) {
  const Call call("key", key);
  STD_TORCH_CHECK(key.dim() == 3, "key: expected Half [T, H_kv, D], got ", describe(key));
  const CacheLayout cache = cache_layout(k_cache, v_cache, call.place, key.size(2));
  expect_tokens("key", key, call.place, -1, k_cache.size(2), key.size(2));
  expect_tokens("value", value, call.place, key.size(0), key.size(1), key.size(2));
  expect("slots", slots, call.place, ScalarType::Long, {-1});
  STD_TORCH_CHECK(slots.size(0) <= key.size(0), "slots: expected at most one for each of ", key.size(0), " tokens, got ", slots.size(0));
  expect_multiple("key", "head size", key.size(2), 8);
  if (slots.size(0) == 0) return;

  CacheArgs args{};
  args.key = halves(key);
  args.value = halves(value);
  args.k_cache = written_halves(k_cache);
  args.v_cache = written_halves(v_cache);
  args.slots = data<const int64_t>(slots);
  args.tokens = slots.size(0);
  args.kv_heads = key.size(1);
  args.head_dim = key.size(2);
  args.key_stride = key.stride(0);
  args.value_stride = value.stride(0);
  cache.give(args);
  check(launch_reshape_and_cache(args, call.stream), "reshape_and_cache");
}

void rotate_and_cache(Tensor q, Tensor key, Tensor value, Tensor positions, Tensor cos_sin, bool halves_turn,
                      std::optional<Tensor> q_weight, std::optional<Tensor> k_weight, double eps, Tensor k_cache, Tensor v_cache,
                      Tensor slots) {
  const Call call("q", q);
  STD_TORCH_CHECK(q.dim() == 3, "q: expected Half [T, H, D], got ", describe(q));
  const int64_t tokens = q.size(0), head_dim = q.size(2);
  const CacheLayout cache = cache_layout(k_cache, v_cache, call.place, head_dim);
  expect_tokens("q", q, call.place, tokens, -1, head_dim);
  expect_tokens("key", key, call.place, tokens, k_cache.size(2), head_dim);
  expect_tokens("value", value, call.place, tokens, k_cache.size(2), head_dim);
  expect("positions", positions, call.place, ScalarType::Long, {tokens});
  expect("cos_sin", cos_sin, call.place, ScalarType::Half, {-1, -1});
  expect("slots", slots, call.place, ScalarType::Long, {-1});
  STD_TORCH_CHECK(slots.size(0) <= tokens, "slots: expected at most one for each of ", tokens, " tokens, got ", slots.size(0));
  expect_multiple("q", "head size", head_dim, 8);
  STD_TORCH_CHECK(head_dim <= 256, "q: expected a head size of at most 256, got ", head_dim);
  expect_multiple("cos_sin", "R", cos_sin.size(1), 4);
  STD_TORCH_CHECK(cos_sin.size(1) <= head_dim, "cos_sin: expected R of at most the head size ", head_dim, ", got ", cos_sin.size(1));
  STD_TORCH_CHECK(q_weight.has_value() == k_weight.has_value(), "q_weight, k_weight: expected both or neither");
  if (q_weight) {
    expect("q_weight", *q_weight, call.place, ScalarType::Half, {head_dim});
    expect("k_weight", *k_weight, call.place, ScalarType::Half, {head_dim});
  }
  if (tokens == 0) return;

  RotateArgs args{};
  args.q = written_halves(q);
  args.key = halves(key);
  args.value = halves(value);
  if (q_weight) {
    args.q_weight = halves(*q_weight);
    args.k_weight = halves(*k_weight);
  }
  args.positions = data<const int64_t>(positions);
  args.cos_sin = halves(cos_sin);
  args.k_cache = written_halves(k_cache);
  args.v_cache = written_halves(v_cache);
  args.slots = data<const int64_t>(slots);
  args.tokens = tokens;
  args.cached = slots.size(0);
  args.q_heads = q.size(1);
  args.kv_heads = key.size(1);
  args.head_dim = head_dim;
  args.rotated = cos_sin.size(1);
  args.q_stride = q.stride(0);
  args.key_stride = key.stride(0);
  args.value_stride = value.stride(0);
  cache.give(args);
  args.eps = eps;
  args.halves = halves_turn;
  check(launch_rotate(args, call.stream), "rotate_and_cache");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("rotate_and_cache", TORCH_BOX(&rotate_and_cache));
}
