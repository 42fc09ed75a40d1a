// How fast this machine's threads read memory: the ceiling of every kernel that reads its weights once. Prints GB/s.
//
//     g++ -O3 -march=native -pthread read_ceiling.cpp -o read_ceiling && ./read_ceiling THREADS
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

int main(int argc, char **argv) {
  const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  constexpr size_t kBytes = size_t{1} << 30, kRuns = 7;
  const size_t words = kBytes / 8 / threads / 64 * 64;
  std::vector<std::vector<uint64_t>> parts(threads, std::vector<uint64_t>(words, 1));
  std::vector<uint64_t> sums(threads);
  double best = 0;
  for (size_t run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; ++t) {
      readers.emplace_back([&, t] {
        uint64_t sum[64] = {};
        for (size_t i = 0; i < words; i += 64) {
          __builtin_prefetch(parts[t].data() + i + 512);
          for (int j = 0; j < 64; ++j) sum[j] ^= parts[t][i + j];
        }
        sums[t] = *std::max_element(sum, sum + 64);
      });
    }
    for (auto &reader : readers) reader.join();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(words) * 8 * threads / taken.count() / 1e9);
  }
  std::fprintf(stderr, "%llu\n", static_cast<unsigned long long>(sums[0]));  // so that nothing is optimized away
  std::printf("%.2f\n", best);
}
