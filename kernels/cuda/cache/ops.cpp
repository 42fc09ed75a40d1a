// torch.ops.voltserve.reshape_and_cache on CUDA tensors; the contract is contracts/attention.h. It allocates
// nothing, does not wait for the GPU and does not read what is on it, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/cache/binding.h"
#include "cuda/cache/launch.h"

namespace {

using namespace voltserve;

void reshape_and_cache(Tensor key, Tensor value, Tensor k_cache, Tensor v_cache, Tensor slots) {
  const Call call("key", key);
  STD_TORCH_CHECK(key.dim() == 3, "key: expected Half [T, H_kv, D], got ", describe(key));
  const CacheLayout cache = cache_layout(k_cache, v_cache, call.place, key.size(2));
  expect_tokens("key", key, call.place, -1, k_cache.size(2), key.size(2));
  expect_tokens("value", value, call.place, key.size(0), key.size(1), key.size(2));
  expect("slots", slots, call.place, ScalarType::Long, {-1});
  STD_TORCH_CHECK(slots.size(0) <= key.size(0), "slots: expected at most one for each of ", key.size(0), " tokens, got ",
                  slots.size(0));
  expect_multiple("key", "head size", key.size(2), 8);
  if (slots.size(0) == 0) return;

  CacheArgs args{};
  args.key = data<const __half>(key);
  args.value = data<const __half>(value);
  args.k_cache = data<__half>(k_cache);
  args.v_cache = data<__half>(v_cache);
  args.slots = data<const int64_t>(slots);
  args.tokens = slots.size(0);
  args.kv_heads = key.size(1);
  args.head_dim = key.size(2);
  args.key_stride = key.stride(0);
  args.value_stride = value.stride(0);
  cache.give(args);
  check(launch_reshape_and_cache(args, call.stream), "reshape_and_cache");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) { m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache)); }
