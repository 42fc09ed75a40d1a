#include "cpu/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace voltserve::cpu {
namespace {

constexpr int kSharesPerThread = 4;
constexpr auto kLookForWork = std::chrono::microseconds(150);  // about the time between two GEMMs of a step

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
  }

  int threads() const { return threads_; }

  void run(int64_t size, int64_t grain, Share share, const void *context) {
    // A multiple of the threads: of five equal shares, one of two threads would do three.
    const int64_t each = std::min<int64_t>(kSharesPerThread, ((size + grain - 1) / grain + threads_ - 1) / threads_);
    const int64_t shares = std::min<int64_t>(threads_ * each, size);
    share_ = share;
    context_ = context;
    size_ = size;
    share_size_ = (size + shares - 1) / shares;
    unfinished_.store(static_cast<int>(shares), std::memory_order_relaxed);
    ++run_;
    left_.store(static_cast<uint64_t>(run_) << 32 | static_cast<uint64_t>(shares));  // publishes what was written above
    if (sleeping_.load() > 0) {
      {
        std::lock_guard lock(mutex_);
      }
      awake_.notify_all();
    }
    while (one_share()) {
    }
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) pause(spins);
  }

  // Ends the threads, which are asleep or polling. The object itself stays, for threads that arrive late.
  void stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    awake_.notify_all();
  }

 private:
  static void pause(int spins) {
    if (spins % 64 == 63) sched_yield();
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }

  // Claims a share, if one is left, and computes it. left_ holds the number of the call and the shares left. The thread that decrements
  // the count owns the share that it took. The call cannot end, nor its description change, before that share is done.
  bool one_share() {
    uint64_t left = left_.load();
    do {
      if ((left & 0xFFFFFFFF) == 0) return false;
    } while (!left_.compare_exchange_weak(left, left - 1));
    const int64_t begin = static_cast<int64_t>((left & 0xFFFFFFFF) - 1) * share_size_;
    if (begin < size_) share_(context_, begin, std::min(size_, begin + share_size_));
    unfinished_.fetch_sub(1, std::memory_order_release);
    return true;
  }

  void work() {
    auto last = std::chrono::steady_clock::now();
    for (int spins = 0;; ++spins) {
      if (one_share()) {
        last = std::chrono::steady_clock::now();
      } else if (spins % 64 == 63 && std::chrono::steady_clock::now() - last > kLookForWork) {
        std::unique_lock lock(mutex_);
        ++sleeping_;
        awake_.wait(lock, [this] { return stopped_ || (left_.load() & 0xFFFFFFFF) != 0; });
        --sleeping_;
        if (stopped_) return;
        last = std::chrono::steady_clock::now();
      }
      pause(spins);
    }
  }

  const int threads_;
  Share share_ = nullptr;
  const void *context_ = nullptr;
  int64_t size_ = 0, share_size_ = 0;
  uint32_t run_ = 0;
  std::atomic<uint64_t> left_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<int> sleeping_{0};
  bool stopped_ = false;  // guarded by mutex_
  std::mutex mutex_;
  std::condition_variable awake_;
};

// The pool and its lock are never destroyed, because threads may still use them while the process ends.
struct State {
  std::mutex busy;
  std::atomic<int> wanted{1};
  Pool *pool = nullptr;
};

State *&state() {
  static State *made = [] {
    // A forked child has none of the threads, and may inherit a held lock, so it starts anew.
    pthread_atfork(nullptr, nullptr, [] {
      const int wanted = state()->wanted;
      state() = new State;
      state()->wanted = wanted;
    });
    return new State;
  }();
  return made;
}

}  // namespace

void set_threads(int threads) { state()->wanted = std::max(1, threads); }

void run_parallel(int64_t size, int64_t grain, Share share, const void *context) {
  if (size <= 0) return;
  State &now = *state();
  std::unique_lock lock(now.busy, std::try_to_lock);
  const int threads = now.wanted;
  if (!lock || threads == 1 || size <= grain) return share(context, 0, size);
  if (!now.pool || now.pool->threads() != threads) {
    if (now.pool) now.pool->stop();  // not deleted, see stop()
    now.pool = new Pool(threads);
  }
  now.pool->run(size, grain, share, context);
}

}  // namespace voltserve::cpu
