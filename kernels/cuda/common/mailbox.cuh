// Sums that blocks leave for another one of the same launch, in memory that is 0xFFFFFFFF everywhere before and after. Each element tells
// by itself that it has come, so nobody waits for a fence or a counter. A block may only wait for blocks before it in the grid,
// which the GPU started before it. Who reads an element leaves kNotYet behind for the next launch.
#pragma once

#include <cstdint>

namespace voltserve {

// The bits of a sum that has not come: a NaN that no arithmetic makes.
constexpr uint32_t kNotYet = 0xFFFFFFFFu;

__device__ inline float4 load_now(const float4 *address) {
  float4 value;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline bool has_come(const float4 &value) {
  return __float_as_uint(value.x) != kNotYet && __float_as_uint(value.y) != kNotYet && __float_as_uint(value.z) != kNotYet &&
         __float_as_uint(value.w) != kNotYet;
}

// Leaves kNotYet.
__device__ inline void renew(float4 *address) {
  const float not_yet = __uint_as_float(kNotYet);
  __stcg(address, make_float4(not_yet, not_yet, not_yet, not_yet));
}

}  // namespace voltserve
