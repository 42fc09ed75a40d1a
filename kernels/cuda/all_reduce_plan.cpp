#include "all_reduce_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace voltserve {

int plan_all_reduce(size_t bytes, int ranks) {
  auto expect = [](bool fits, const char *name, const std::string &expected, size_t got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  expect(bytes > 0 && bytes <= kMaxReduceData, "bytes", "1 to " + std::to_string(kMaxReduceData), bytes);
  expect(ranks >= 2 && ranks <= kMaxRanks, "ranks", "2 to " + std::to_string(kMaxRanks), ranks);
  const size_t lines = (bytes + kLineData - 1) / kLineData;
  return static_cast<int>(std::min<size_t>((lines + kReduceThreads - 1) / kReduceThreads, kReduceBlocks));
}

}  // namespace voltserve
