// A thread pool for the CPU's kernels: many short parallel loops in a row, on a machine that has other work as well.
//
// OpenMP's regions end in a barrier that waits for every thread, even one that the system has not scheduled yet. Where the engine's
// other processes use the same cores, each of a step's hundreds of regions can cost a time slice. Here the caller and the threads
// claim small shares until none is left, and the caller waits only for shares that were claimed. A late thread finds nothing to do
// and has delayed nobody. Idle threads poll for work for a while, yielding, and then sleep.
#pragma once

#include <algorithm>
#include <cstdint>

namespace voltserve::cpu {

// Sets how many threads work on one call, the caller's included, from the next call on.
void set_threads(int threads);

// The fewest items, of `multiplications` each, for which waking another thread saves more than it costs.
inline int64_t grain(int64_t multiplications) {
  constexpr int64_t kMultiplicationsPerThread = 64 * 1024;
  return kMultiplicationsPerThread / std::max<int64_t>(multiplications, 1) + 1;
}

using Share = void (*)(const void *context, int64_t begin, int64_t end);

// Calls share(context, begin, end) on several threads for ranges that cover 0 .. size, and returns when all are done. Ranges are about
// equally many per thread, and of about `grain` items or more. The caller works alone if size <= grain, or if another thread of the
// process is in here already.
void run_parallel(int64_t size, int64_t grain, Share share, const void *context);

template <class Function>
void parallel_for(int64_t size, int64_t grain, const Function &function) {
  run_parallel(size, grain, [](const void *context, int64_t begin, int64_t end) {
    (*static_cast<const Function *>(context))(begin, end);
  }, &function);
}

}  // namespace voltserve::cpu
