// Checks of what ops on the paged cache take: heads of tokens, and a cache's strides. Included by cuda/*/ops.cpp only.
#pragma once

#include "cuda/common/binding.h"

namespace voltserve {

// Expects [tokens, heads, D], the last two dimensions contiguous and every token 16-byte aligned; -1 means any length.
inline void expect_tokens(const char *name, const Tensor &tensor, Place place, int64_t tokens, int64_t heads, int64_t head_dim) {
  expect(name, tensor, place, ScalarType::Half, {tokens, heads, head_dim}, Layout::strided);
  const int64_t length = tensor.size(1) * tensor.size(2);
  const bool together = tensor.stride(2) == 1 && (tensor.size(1) < 2 || tensor.stride(1) == tensor.size(2));
  const bool apart = tensor.size(0) < 2 || (tensor.stride(0) % 8 == 0 && tensor.stride(0) >= length);
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  STD_TORCH_CHECK(tensor.size(0) == 0 || (together && apart && aligned), name,
                  ": expected heads side by side and tokens on 16-byte boundaries, got strides ", tensor.stride(0), ", ",
                  tensor.stride(1), ", ", tensor.stride(2));
}

// Strides of a cache, in chunks of 16 bytes.
struct CacheLayout {
  int block_size, block_chunks, token_chunks, head_chunks;

  template <class Args>
  void give(Args &args) const {
    args.block_size = block_size;
    args.block_chunks = block_chunks;
    args.token_chunks = token_chunks;
    args.head_chunks = head_chunks;
  }
};

inline CacheLayout cache_layout(const Tensor &k_cache, const Tensor &v_cache, Place place, int64_t head_dim) {
  expect("k_cache", k_cache, place, ScalarType::Half, {-1, -1, -1, head_dim}, Layout::strided);
  expect("v_cache", v_cache, place, ScalarType::Half, shape_of(k_cache), Layout::strided);
  expect_multiple("k_cache", "its block size", k_cache.size(1), 8);
  STD_TORCH_CHECK(k_cache.size(1) < 1 << 14, "k_cache: expected blocks of less than ", 1 << 14, " tokens, got ", k_cache.size(1));
  for (int64_t d = 0; d < 4; ++d) {
    const int64_t stride = k_cache.stride(d);
    STD_TORCH_CHECK(d == 3 ? stride == 1 : stride % 8 == 0,
                    "k_cache: expected strides that are multiples of 8, and 1 at last, got ", stride, " in dimension ", d);
    STD_TORCH_CHECK(v_cache.stride(d) == stride, "v_cache: expected k_cache's strides, got ", v_cache.stride(d), " for ", stride,
                    " in dimension ", d);
  }
  STD_TORCH_CHECK(k_cache.size(0) * (k_cache.stride(0) / 8) < int64_t{1} << 31,
                  "k_cache: expected less than 32 GiB from its first "
                  "block to its last, got ",
                  k_cache.size(0), " blocks ", 2 * k_cache.stride(0), " bytes apart");
  expect_aligned("k_cache", k_cache);
  expect_aligned("v_cache", v_cache);
  return {static_cast<int>(k_cache.size(1)), static_cast<int>(k_cache.stride(0) / 8), static_cast<int>(k_cache.stride(1) / 8),
          static_cast<int>(k_cache.stride(2) / 8)};
}

}  // namespace voltserve
