// torch.ops.voltserve.rotate_and_cache on CUDA tensors; the contract is contracts/attention.h. It allocates
// nothing, does not wait for the GPU and does not read what is on it, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cuda/cache/binding.h"
#include "cuda/rotate/launch.h"

namespace {

using namespace voltserve;

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
  STD_TORCH_CHECK(cos_sin.size(1) <= head_dim, "cos_sin: expected R of at most the head size ", head_dim, ", got ",
                  cos_sin.size(1));
  STD_TORCH_CHECK(q_weight.has_value() == k_weight.has_value(), "q_weight, k_weight: expected both or neither");
  if (q_weight) {
    expect("q_weight", *q_weight, call.place, ScalarType::Half, {head_dim});
    expect("k_weight", *k_weight, call.place, ScalarType::Half, {head_dim});
  }
  if (tokens == 0) return;

  RotateArgs args{};
  args.q = data<__half>(q);
  args.key = data<const __half>(key);
  args.value = data<const __half>(value);
  if (q_weight) {
    args.q_weight = data<const __half>(*q_weight);
    args.k_weight = data<const __half>(*k_weight);
  }
  args.positions = data<const int64_t>(positions);
  args.cos_sin = data<const __half>(cos_sin);
  args.k_cache = data<__half>(k_cache);
  args.v_cache = data<__half>(v_cache);
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

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) { m.impl("rotate_and_cache", TORCH_BOX(&rotate_and_cache)); }
