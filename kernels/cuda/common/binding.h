// What every op on CUDA tensors needs beside bindings/arguments.h: its GPU and stream, raw pointers, errors of launches, and scratch
// memory. Included by cuda/*/ops.cpp only.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "bindings/arguments.h"

namespace voltserve {

inline void check(cudaError_t error, const char *what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

struct Gpu {
  int index, arch, processors;  // arch: compute capability, 70 for V100
};

inline const Gpu &gpu_of(int index) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  int major = 0, minor = 0, processors = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "compute capability");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index), "multiprocessors");
  return known[index] = {index, 10 * major + minor, processors};
}

// One call of an op: the GPU of the argument `name`, which is current while this object lives, and torch's current stream there.
struct Call {
  const Gpu &gpu;
  const Place place;
  const cudaStream_t stream;
  const torch::stable::accelerator::DeviceGuard guard;

  Call(const char *name, const Tensor &tensor)
      : gpu(gpu_of(index_of(name, tensor))), place{gpu.index}, stream(stream_of(gpu.index)), guard(gpu.index) {}

 private:
  static int index_of(const char *name, const Tensor &tensor) {
    STD_TORCH_CHECK(tensor.is_cuda(), name, ": expected a tensor on a GPU, got ", describe(tensor));
    return tensor.get_device_index();
  }
  static cudaStream_t stream_of(int device) {
    void *stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
  }
};

inline void expect_aligned(const char *name, const Tensor &tensor) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, name, ": expected a 16-byte boundary");
}

template <class T>
T *data(const Tensor &tensor) {
  return static_cast<T *>(tensor.data_ptr());
}

// A contiguous tensor of this shape, of x's dtype, on the call's GPU. torch::stable::new_empty would look the operator up by name,
// which takes the host about as long as a launch.
inline Tensor empty(const Call &call, const Tensor &x, const std::vector<int64_t> &shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > 0; step *= shape[d]) strides[d] = step;
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cuda(), call.gpu.index, &made));
  return Tensor(made);
}

// What an op finds in its workspace: anything (scratch), or 0xFFFFFFFF everywhere (mailbox), which it must restore.
enum class Use { scratch, mailbox };

// At least `words` of 4 bytes. Calls on one stream share the memory, since their kernels never run at the same time. It is never
// freed, because a captured graph may point at it. The driver allocates it, not torch: memory that torch hands out during a capture
// is filled only when the graph is replayed.
inline void *workspace(const Call &call, Use use, size_t words) {
  struct Kept {
    void *memory = nullptr;
    size_t words = 0;
  };
  static std::mutex mutex;
  static std::map<std::tuple<int, cudaStream_t, Use>, Kept> all;
  const std::lock_guard<std::mutex> lock(mutex);
  Kept &kept = all[{call.gpu.index, call.stream, use}];
  if (kept.memory != nullptr && kept.words >= words) return kept.memory;

  Kept grown{nullptr, std::max<size_t>(words, 1)};
  // Relaxed mode allows this during a capture; the stream of its own waits for no other.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "workspace");
  cudaStream_t aside = nullptr;
  check(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), "workspace");
  check(cudaMalloc(&grown.memory, 4 * grown.words), "workspace");
  check(cudaMemsetAsync(grown.memory, 0xFF, 4 * grown.words, aside), "workspace");
  check(cudaStreamSynchronize(aside), "workspace");
  check(cudaStreamDestroy(aside), "workspace");
  check(cudaThreadExchangeStreamCaptureMode(&mode), "workspace");
  kept = grown;
  return kept.memory;
}

}  // namespace voltserve
