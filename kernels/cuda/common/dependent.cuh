// Programmatic dependent launch: from compute capability 9.0 on, a kernel may start before the kernel in front of it has ended.
// Launch overhead and loads of weights, which no kernel writes, then overlap with the kernel in front. On older GPUs, a V100
// among them, everything here does nothing.
//
// Rules for a kernel that is launched with launch_dependent():
//   1. Every thread calls wait_for_previous() before it reads or writes anything that an earlier kernel writes or reads.
//      Constants such as weights may be read before.
//   2. After that call all earlier kernels have ended: the kernel in front made the same call.
//   3. What earlier kernels wrote is read by load_written(), not by __ldg(): L1 may hold older values.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace voltserve {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kDependentLaunch = true;
#else
constexpr bool kDependentLaunch = false;
#endif

// Returns once all earlier kernels have ended and their writes are visible.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once every block has called this, blocks of the next kernel may start on free multiprocessors.
__device__ inline void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class T>
__device__ inline T load_written(const T *address) {
  if constexpr (kDependentLaunch) {
    return *address;
  } else {
    return __ldg(address);
  }
}

// Makes the thread wait until `value` is loaded, although nothing needs it yet, so that its load completes before what follows.
// The instruction is predicated on one value of it, and does nothing even then.
__device__ inline void await(uint32_t value) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9E3779B9; @p nanosleep.u32 0; }" ::"r"(value));
}

// Launches KERNEL, which keeps the rules above: as a dependent launch where it was compiled for 9.0 or later.
template <auto KERNEL, class... Args>
cudaError_t launch_dependent(int blocks, int threads, size_t shared_bytes, cudaStream_t stream, const Args &...args) {
  static const bool dependent = [] {
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
  config.numAttrs = dependent;
  return cudaLaunchKernelEx(&config, KERNEL, args...);
}

}  // namespace voltserve
