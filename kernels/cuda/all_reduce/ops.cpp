// The all-reduce ops on CUDA tensors; the contract is contracts/all_reduce.h. all_reduce neither waits for the GPU nor reads its
// memory, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "cuda/all_reduce/launch.h"
#include "cuda/all_reduce/binding.h"

namespace {

using namespace voltserve;

Tensor all_reduce(Tensor x, std::vector<int64_t> to, std::vector<int64_t> from, Tensor epochs, int64_t rank, double limit,
                  std::optional<Tensor> late) {
  const Call call("x", x);
  expect_dtype("x", x.scalar_type(), {ScalarType::Half, ScalarType::Float});
  expect("x", x, call.place, x.scalar_type(), shape_of(x));
  expect_aligned("x", x);
  ReduceArgs args = places(call, to, from, epochs, rank, limit, late);

  Tensor y = empty(call, x, shape_of(x));
  const int64_t count = x.numel();
  if (count == 0) return y;
  args.half = x.scalar_type() == ScalarType::Half;
  int blocks = 0;
  try {
    blocks = plan_all_reduce(count, args.half, args.ranks);
  } catch (const std::invalid_argument &error) {
    STD_TORCH_CHECK(false, "x: ", error.what());
  }
  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.count = static_cast<int>(count);
  check(launch_all_reduce(args, blocks, call.stream), "all_reduce");
  return y;
}

int64_t map_host_memory(Tensor epochs, int64_t address, int64_t bytes) {
  const Call call("epochs", epochs);
  void *const memory = reinterpret_cast<void *>(address);
  check(cudaHostRegister(memory, bytes, cudaHostRegisterMapped), "map_host_memory: cudaHostRegister");
  void *mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, memory, 0), "map_host_memory: cudaHostGetDevicePointer");
  return reinterpret_cast<int64_t>(mapped);
}

void unmap_host_memory(Tensor epochs, int64_t address) {
  const Call call("epochs", epochs);
  check(cudaHostUnregister(reinterpret_cast<void *>(address)), "unmap_host_memory");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("all_reduce", TORCH_BOX(&all_reduce));
  m.impl("map_host_memory", TORCH_BOX(&map_host_memory));
  m.impl("unmap_host_memory", TORCH_BOX(&unmap_host_memory));
}
