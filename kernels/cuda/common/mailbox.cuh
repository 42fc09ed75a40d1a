// Partial sums that blocks of one launch hand to another block of the same launch.
//
// The memory is 0xFFFFFFFF everywhere before and after a launch. A value other than that has arrived, so no fence and no counter is
// needed: each element announces itself. The reader writes 0xFFFFFFFF back for the next launch.
//
// A block may wait only for blocks with a smaller index. The GPU started those earlier, so waiting cannot deadlock.
#pragma once

#include <cstdint>

namespace voltserve {

// The bits of a value that has not arrived: a NaN that arithmetic never produces.
constexpr uint32_t kEmpty = 0xFFFFFFFFu;

__device__ inline float4 load_now(const float4 *address) {
  float4 value;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline bool has_arrived(const float4 &value) {
  return __float_as_uint(value.x) != kEmpty && __float_as_uint(value.y) != kEmpty && __float_as_uint(value.z) != kEmpty &&
         __float_as_uint(value.w) != kEmpty;
}

// Empties the element for the next launch.
__device__ inline void clear(float4 *address) {
  const float empty = __uint_as_float(kEmpty);
  __stcg(address, make_float4(empty, empty, empty, empty));
}

}  // namespace voltserve
