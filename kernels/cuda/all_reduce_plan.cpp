#include "all_reduce_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace voltserve {

ReducePlan plan_all_reduce(const ReduceProblem &p) {
  auto expect = [](bool fits, const char *name, const std::string &expected, long long got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  expect(p.bytes > 0 && p.bytes <= kMaxReduceData, "bytes", "1 to " + std::to_string(kMaxReduceData), p.bytes);
  expect(p.ranks >= 2 && p.ranks <= kMaxRanks, "ranks", "2 to " + std::to_string(kMaxRanks), p.ranks);
  const size_t lines = (p.bytes + kLineData - 1) / kLineData;
  ReducePlan plan{};
  plan.blocks = static_cast<int>(std::min<size_t>((lines + kReduceThreads - 1) / kReduceThreads, kReduceBlocks));
  plan.watch = p.over_a_bus && p.bytes > kUnwatchedData;
  plan.reason = !p.over_a_bus ? "lines come to this GPU's own memory, where looking for them is free"
                : plan.watch ? "many lines: looking for all of them too early would fill the bus"
                             : "few lines: each is looked for at once";
  return plan;
}

}  // namespace voltserve
