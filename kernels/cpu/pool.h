// Threads for the CPU's kernels, made for many short products in a row on a machine that has other work as well.
//
// OpenMP's regions end in a barrier that waits for every thread, even one that the system has not scheduled yet: where the
// engine's other processes use the same cores, each of a step's hundreds of regions can cost a time slice. Here the caller
// and the threads claim small shares until none is left, and the caller waits only for shares that were claimed: a thread
// that comes late finds nothing to do and has held up nobody. Idle threads look for work for a while, yielding, and
// then sleep.
#pragma once

#include <algorithm>
#include <cstdint>

namespace voltserve::cpu {

// How many threads work on one call, the caller's included. Takes effect at the next call.
void set_threads(int threads);

// Of items with `multiplications` each, how many a thread takes at least: below this, waking another costs more than it saves.
inline int64_t grain(int64_t multiplications) {
  constexpr int64_t kMultiplicationsPerThread = 64 * 1024;
  return kMultiplicationsPerThread / std::max<int64_t>(multiplications, 1) + 1;
}

using Share = void (*)(const void* context, int64_t begin, int64_t end);

// Calls share(context, begin, end) for ranges that cover 0..size, about as many for each thread and of about `grain` at least,
// on several threads at once, and returns when all are done. Up to `grain` in all, and where another thread of the process is
// in here already, the caller works alone.
void run_parallel(int64_t size, int64_t grain, Share share, const void* context);

template <class Function>
void parallel_for(int64_t size, int64_t grain, const Function& function) {
  run_parallel(
      size, grain, [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Function*>(context))(begin, end); },
      &function);
}

}  // namespace voltserve::cpu
