// Kernels that start before the one before them has ended: programmatic dependent launch, from compute capability 9.0 on. What a launch
// takes, and reading what no kernel writes (weights), then lies behind the kernel before. For older GPUs all of this is nothing.
//
// A kernel launched with launch_early() calls wait_for_earlier() in every thread before it reads or writes what any earlier kernel
// reads or writes, all but constants. Then every kernel before it has ended, since the one before it has waited, too. What earlier
// kernels wrote is read by load_written(), not __ldg(): the L1 may hold what was there before.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace voltserve {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// Until all earlier kernels have ended and what they wrote is seen.
__device__ inline void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once every block has said so, the next kernel's blocks take the places that are free.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class T>
__device__ inline T load_written(const T *address) {
  if constexpr (kStartsEarly) {
    return *address;
  } else {
    return __ldg(address);
  }
}

// Waits for `value`, which otherwise nobody needs yet, so that its load comes before what follows: an instruction that runs for one
// value of it, and then does nothing.
__device__ inline void need(uint32_t value) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9E3779B9; @p nanosleep.u32 0; }" ::"r"(value));
}

// Launches KERNEL, which does as said above, early where it was compiled for that.
template <auto KERNEL, class... Args>
cudaError_t launch_early(int blocks, int threads, size_t shared_bytes, cudaStream_t stream, const Args &...args) {
  static const bool early = [] {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, KERNEL, args...);
}

}  // namespace voltserve
