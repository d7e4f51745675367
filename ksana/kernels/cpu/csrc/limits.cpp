#include "limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "thread_pool.h"

namespace ksana {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

typedef uint64_t words __attribute__((vector_size(64)));

uint64_t read_all(const words* from, int64_t count) {
  words sums[4] = {};
  for (int64_t i = 0; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(from + i + j + 16);
      sums[j] += from[i + j];
    }
  return (sums[0] + sums[1] + sums[2] + sums[3])[0];
}

// Memory in large pages where there are any, as weights have it: translations of addresses are no part of the limit.
struct LargePages {
  void* data;

  explicit LargePages(int64_t bytes) {
    constexpr int64_t page = 2 << 20;
    const size_t size = static_cast<size_t>((bytes + page - 1) / page * page);
    data = std::aligned_alloc(page, size);
#if defined(MADV_HUGEPAGE)
    if (data != nullptr) madvise(data, size, MADV_HUGEPAGE);
#endif
  }
  ~LargePages() { std::free(data); }
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;
};

}  // namespace

double read_bandwidth(int64_t bytes, int32_t repeats) {
  ThreadPool& pool = ThreadPool::instance();
  const int64_t threads = pool.size(), share = bytes / threads / static_cast<int64_t>(sizeof(words));
  const LargePages memory(threads * share * static_cast<int64_t>(sizeof(words)));
  words* const buffer = static_cast<words*>(memory.data);
  if (buffer == nullptr) return 0;
  pool.run(threads, [&](int64_t i) { std::fill_n(buffer + i * share, share, words{} + 1); });
  std::vector<uint64_t> sums(threads);
  double best = 0;
  for (int32_t repeat = 0; repeat < repeats; ++repeat) {
    const Clock::time_point start = Clock::now();
    pool.run(threads, [&](int64_t i) { sums[i] += read_all(buffer + i * share, share); });
    best = std::max(best,
                    static_cast<double>(share * threads * static_cast<int64_t>(sizeof(words))) / seconds_since(start));
  }
  volatile uint64_t keep = sums[0];
  (void)keep;
  return best;
}

double product_peak(const Kernels& kernels, DType type, int32_t repeats) {
  ThreadPool& pool = ThreadPool::instance();
  const int threads = pool.size();
  double best = 0;
  for (int32_t repeat = 0; repeat < repeats; ++repeat) {
    const int64_t steps = 2000;
    std::vector<double> operations(threads);
    const Clock::time_point start = Clock::now();
    pool.run(threads, [&](int64_t i) { operations[i] = kernels.dot_products(type, steps); });
    const double seconds = seconds_since(start);
    double total = 0;
    for (const double count : operations) total += count;
    best = std::max(best, total / seconds);
  }
  return best;
}

}  // namespace ksana
