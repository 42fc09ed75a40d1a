#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/norm/args.h"

namespace voltserve {

NormPlan plan_norm(int rows, int hidden, int ranks) {
  auto expect = [](bool fits, const char *name, const std::string &expected, int got) {
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got));
  };
  const bool reduce = ranks > 1;
  expect(hidden > 0 && hidden <= kMaxHidden && hidden % kNormNumbers == 0, "hidden",
         "a multiple of 8, 8 to " + std::to_string(kMaxHidden), hidden);
  expect(rows > 0, "rows", "at least 1", rows);
  if (reduce) {
    expect(ranks <= kMaxRanks, "ranks", "at most " + std::to_string(kMaxRanks), ranks);
    const int most = std::min<int>(kReduceBlocks, kMaxReduceData / 2 / hidden);
    expect(rows <= most, "rows", "at most " + std::to_string(most) + " of ranks", rows);
  }
  const int vectors = ceil_div(hidden, reduce ? kNormNumbersOfRanks : kNormNumbers), each = ceil_div(vectors, kNormThreads);
  return {each, ceil_div(ceil_div(vectors, each), 32) * 32};
}

}  // namespace voltserve
