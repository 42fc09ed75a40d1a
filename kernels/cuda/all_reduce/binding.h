// The arguments of ops where ranks meet (contracts/all_reduce.h), checked: to, from_, epochs, rank, limit, late. Included by
// cuda/*/ops.cpp only.
#pragma once

#include <optional>
#include <vector>

#include "cuda/all_reduce/args.h"
#include "cuda/common/binding.h"

namespace voltserve {

inline void expect_slots(const char *name, const std::vector<int64_t> &slots, size_t least) {
  STD_TORCH_CHECK(slots.size() >= least && slots.size() <= kMaxRanks, name, ": expected ", least, " to ", kMaxRanks,
                  " addresses, got ", slots.size());
  for (const int64_t slot : slots) {
    STD_TORCH_CHECK(slot % 16 == 0, name, ": expected multiples of 16, got ", slot);
  }
}

// All of the kernel's arguments except the numbers.
inline ReduceArgs places(const Call &call, const std::vector<int64_t> &to, const std::vector<int64_t> &from, const Tensor &epochs,
                         int64_t rank, double limit, const std::optional<Tensor> &late) {
  expect_slots("to", to, 1);
  expect_slots("from_", from, 2);
  expect("epochs", epochs, call.place, ScalarType::Int, {kReduceEpochs});
  if (late) expect("late", *late, call.place, ScalarType::Int, {1});
  const int64_t ranks = static_cast<int64_t>(from.size());
  STD_TORCH_CHECK(rank >= 0 && rank < ranks, "rank: expected 0 to ", ranks - 1, ", got ", rank);
  STD_TORCH_CHECK(limit > 0, "limit: expected seconds above 0, got ", limit);

  ReduceArgs args{};
  args.rank = static_cast<int>(rank);
  args.ranks = static_cast<int>(ranks);
  args.copies = static_cast<int>(to.size());
  for (size_t i = 0; i < to.size(); ++i) args.to[i] = reinterpret_cast<unsigned char *>(to[i]);
  for (size_t i = 0; i < from.size(); ++i) args.from[i] = reinterpret_cast<unsigned char *>(from[i]);
  args.epochs = data<uint32_t>(epochs);
  args.limit_ns = static_cast<uint64_t>(limit * 1e9);
  args.late = late ? data<int>(*late) : nullptr;
  return args;
}

}  // namespace voltserve
