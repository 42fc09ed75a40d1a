// The all-reduce ops on CUDA tensors; the contract is include/all_reduce.h. all_reduce neither waits for the GPU nor reads what is on
// it, so it can be captured in CUDA graphs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "all_reduce_launch.h"
#include "binding.h"

namespace {

using namespace voltserve;

void expect_slots(const char* name, const std::vector<int64_t>& slots, size_t least) {
  STD_TORCH_CHECK(slots.size() >= least && slots.size() <= kMaxRanks, name, ": expected ", least, " to ", kMaxRanks, " addresses, got ",
                  slots.size());
  for (const int64_t slot : slots) {
    STD_TORCH_CHECK(slot % 16 == 0, name, ": expected multiples of 16, got ", slot);
  }
}

Tensor all_reduce(Tensor x, std::vector<int64_t> to, std::vector<int64_t> from, Tensor turns, int64_t rank, double limit,
                  std::optional<Tensor> late) {
  const Call call("x", x);
  expect_dtype("x", x.scalar_type(), {ScalarType::Half, ScalarType::Float});
  expect("x", x, call.place, x.scalar_type(), shape_of(x));
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, "x: expected a 16-byte boundary");
  expect_slots("to", to, 1);
  expect_slots("from_", from, 2);
  expect("turns", turns, call.place, ScalarType::Int, {kReduceTurns});
  if (late) expect("late", *late, call.place, ScalarType::Int, {1});
  const int64_t ranks = static_cast<int64_t>(from.size());
  STD_TORCH_CHECK(rank >= 0 && rank < ranks, "rank: expected 0 to ", ranks - 1, ", got ", rank);
  STD_TORCH_CHECK(limit > 0, "limit: expected seconds above 0, got ", limit);

  Tensor y = torch::stable::new_empty(x, shape_of(x));
  const int64_t count = x.numel();
  if (count == 0) return y;
  ReduceArgs args{};
  args.half = x.scalar_type() == ScalarType::Half;
  int blocks = 0;
  try {
    blocks = plan_all_reduce(count, args.half, static_cast<int>(ranks));
  } catch (const std::invalid_argument& error) {
    STD_TORCH_CHECK(false, "x: ", error.what());
  }
  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.count = static_cast<int>(count);
  args.rank = static_cast<int>(rank);
  args.ranks = static_cast<int>(ranks);
  args.copies = static_cast<int>(to.size());
  for (size_t i = 0; i < to.size(); ++i) args.to[i] = reinterpret_cast<unsigned char*>(to[i]);
  for (size_t i = 0; i < from.size(); ++i) args.from[i] = reinterpret_cast<unsigned char*>(from[i]);
  args.turns = data<uint32_t>(turns);
  args.limit_ns = static_cast<uint64_t>(limit * 1e9);
  args.late = late ? data<int>(*late) : nullptr;
  check(launch_all_reduce(args, blocks, call.stream), "all_reduce");
  return y;
}

int64_t map_host_memory(Tensor turns, int64_t address, int64_t bytes) {
  const Call call("turns", turns);
  void* const memory = reinterpret_cast<void*>(address);
  check(cudaHostRegister(memory, bytes, cudaHostRegisterMapped), "map_host_memory: cudaHostRegister");
  void* mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, memory, 0), "map_host_memory: cudaHostGetDevicePointer");
  return reinterpret_cast<int64_t>(mapped);
}

void unmap_host_memory(Tensor turns, int64_t address) {
  const Call call("turns", turns);
  check(cudaHostUnregister(reinterpret_cast<void*>(address)), "unmap_host_memory");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voltserve, CUDA, m) {
  m.impl("all_reduce", TORCH_BOX(&all_reduce));
  m.impl("map_host_memory", TORCH_BOX(&map_host_memory));
  m.impl("unmap_host_memory", TORCH_BOX(&unmap_host_memory));
}
