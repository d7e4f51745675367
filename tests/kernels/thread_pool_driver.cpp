// Jobs for the thread pool, of plain memory, for the thread sanitizer to watch: every job reads what other threads
// wrote in the job before, with nothing but the pool between them.
//
// scripts/check_sanitizers.py compiles and runs it.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

constexpr int kJobs = 200;
constexpr int kJobsBetweenRests = 40;
constexpr auto kRest = std::chrono::milliseconds(50);  // in which the workers stop spinning, and sleep

// Moves every value one place on, in each job; after a job for each place they are all back.
bool rotate(ksana::ThreadPool& pool, long tasks) {
  std::vector<long> values(tasks), moved(tasks);
  for (long i = 0; i < tasks; ++i) values[i] = i;
  for (int job = 0; job < kJobs; ++job) {
    if (job % kJobsBetweenRests == 0) std::this_thread::sleep_for(kRest);
    pool.run(tasks, [&](long i) { moved[i] = values[(i + 1) % tasks]; });
    values.swap(moved);
  }
  for (long i = 0; i < tasks; ++i) {
    if (values[i] != (i + kJobs) % tasks) return false;
  }
  return true;
}

// The first task waits for all others, those of its own thread's share among them.
bool help(ksana::ThreadPool& pool) {
  const long tasks = 16;
  std::atomic<long> finished{0};
  bool helped = true;
  pool.run(tasks, [&](long i) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (i == 0 && finished < tasks - 1) {
      if (std::chrono::steady_clock::now() > deadline) {
        helped = false;
        break;
      }
      std::this_thread::yield();
    }
    ++finished;
  });
  return helped;
}

}  // namespace

int main() {
  ksana::ThreadPool& pool = ksana::ThreadPool::instance();
  for (int threads : {1, 2, 4, 3, 8, 1, 2}) {
    pool.resize(threads);
    if (pool.size() != threads || !rotate(pool, 64) || !rotate(pool, 3) || (threads > 1 && !help(pool))) {
      std::fprintf(stderr, "wrong results with %d threads\n", threads);
      return 1;
    }
  }
  std::printf("no task was lost, doubled or seen half done\n");
  return 0;
}
