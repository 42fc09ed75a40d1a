#include "all_reduce_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace voltserve {

ReducePlan plan_all_reduce(size_t bytes, int ranks) {
  auto expect = [](bool fits, const char *name, const std::string &expected, size_t got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  expect(bytes > 0 && bytes <= kMaxReduceData, "bytes", "1 to " + std::to_string(kMaxReduceData), bytes);
  expect(ranks >= 2 && ranks <= kMaxRanks, "ranks", "2 to " + std::to_string(kMaxRanks), ranks);
  if (bytes <= kMaxLineData) {
    const size_t lines = (bytes + kLineData - 1) / kLineData;
    return {Protocol::lines, static_cast<int>((lines + kReduceThreads - 1) / kReduceThreads),
            "few bytes: a flag in every line spares a fence and one way over the bus"};
  }
  const size_t chunks = (bytes + kChunkData - 1) / kChunkData;
  return {Protocol::chunks, 2 * static_cast<int>(std::min<size_t>(chunks, kReduceBlocks / 2)),
          "many bytes: one flag a chunk keeps the bus for data"};
}

}  // namespace voltserve
