#include "cuda/all_reduce/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace voltserve {

int plan_all_reduce(size_t count, bool half, int ranks) {
  const size_t bytes = count * (half ? 2 : 4), numbers = half ? kLineHalves : kLineFloats;
  auto expect = [](bool fits, const char *name, const std::string &expected, size_t got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  expect(bytes > 0 && bytes <= kMaxReduceData, "bytes", "1 to " + std::to_string(kMaxReduceData), bytes);
  expect(ranks >= 2 && ranks <= kMaxRanks, "ranks", "2 to " + std::to_string(kMaxRanks), ranks);
  const size_t lines = (count + numbers - 1) / numbers;
  return static_cast<int>(std::min<size_t>((lines + kReduceThreads - 1) / kReduceThreads, kReduceBlocks));
}

}  // namespace voltserve
