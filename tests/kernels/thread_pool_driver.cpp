// Jobs for the thread pool, of plain memory, for the thread sanitizer to watch: every job reads what other threads
// wrote in the job before, with nothing but the pool between them.
//
// scripts/check_sanitizers.py compiles and runs it.

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

constexpr long kTasks = 64;
constexpr int kJobs = 200;
constexpr int kJobsBetweenRests = 40;
constexpr auto kRest = std::chrono::milliseconds(50);  // in which the workers stop spinning, and sleep

// Moves every value one place on, in each job; after a job for each place they are all back.
bool rotate(ksana::ThreadPool& pool) {
  std::vector<long> values(kTasks), moved(kTasks);
  for (long i = 0; i < kTasks; ++i) values[i] = i;
  for (int job = 0; job < kJobs; ++job) {
    if (job % kJobsBetweenRests == 0) std::this_thread::sleep_for(kRest);
    pool.run(kTasks, [&](long i) { moved[i] = values[(i + 1) % kTasks]; });
    values.swap(moved);
  }
  for (long i = 0; i < kTasks; ++i) {
    if (values[i] != (i + kJobs) % kTasks) return false;
  }
  return true;
}

}  // namespace

int main() {
  ksana::ThreadPool& pool = ksana::ThreadPool::instance();
  for (int threads : {1, 2, 4, 3, 8, 1, 2}) {
    pool.resize(threads);
    if (pool.size() != threads || !rotate(pool)) {
      std::fprintf(stderr, "wrong results with %d threads\n", threads);
      return 1;
    }
  }
  std::printf("no task was lost, doubled or seen half done\n");
  return 0;
}
