#include "thread_pool.h"

#include <pthread.h>

#include <exception>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ksana {
namespace {

constexpr int kCountBits = 32;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
constexpr int kWorkerSpins = 4000;   // of a worker before it sleeps: a tenth of a millisecond or so
constexpr int kCallerSpins = 20000;  // of a caller before it lets others have the processor

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  // Never destroyed: threads of the process may still compute while it ends, and after a fork the locks may be held,
  // and the condition awaited, by threads that are no more.
  static ThreadPool* pool;
  static const int registered = [] {
    pool = new ThreadPool;
    return pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });
  }();
  (void)registered;
  return *pool;
}

int ThreadPool::resize(int threads) {
  std::lock_guard<std::mutex> running(mutex_);
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stopping_ = false;
  const uint64_t seen = job_;
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i, seen] { work(i, seen); });
  } catch (const std::exception&) {  // of a limit on threads or memory
  }
  const int size = static_cast<int>(workers_.size()) + 1;
  shares_ = std::make_unique<Share[]>(size);
  size_.store(size, std::memory_order_relaxed);
  return size;
}

void ThreadPool::launch(int64_t count, Function function, const void* context) {
  count_ = count;
  function_ = function;
  context_ = context;
  unfinished_.store(count, std::memory_order_relaxed);
  const uint64_t job = (job_.load(std::memory_order_relaxed) + 1) & kCountMask;
  for (int i = 0; i < size(); ++i)
    shares_[i].state.store(job << kCountBits | static_cast<uint64_t>(first_task(i + 1) - first_task(i)),
                           std::memory_order_release);
  job_.store(job, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
    }
    wake_.notify_all();
  }
  drain(0, job);
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0;) {
    if (++spins < kCallerSpins)
      pause();
    else
      std::this_thread::yield();
  }
}

// Returns how many tasks were left, or 0 if none was.
int64_t ThreadPool::Share::take(uint64_t job) {
  uint64_t before = state.load(std::memory_order_acquire);
  while (before >> kCountBits == job && (before & kCountMask) != 0)
    if (state.compare_exchange_weak(before, before - 1, std::memory_order_acq_rel))
      return static_cast<int64_t>(before & kCountMask);
  return 0;
}

void ThreadPool::drain(int thread, uint64_t job) {
  int64_t finished = 0;
  for (int i = 0; i < size(); ++i) {
    const int share = (thread + i) % size();
    while (const int64_t left = shares_[share].take(job)) {
      function_(context_, first_task(share + 1) - left);
      ++finished;
    }
  }
  if (finished > 0) unfinished_.fetch_sub(finished, std::memory_order_release);
}

void ThreadPool::work(int thread, uint64_t seen) {
  while (true) {
    for (int spins = 0; job_.load(std::memory_order_acquire) == seen && !stopping_;) {
      if (++spins < kWorkerSpins) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return job_.load(std::memory_order_seq_cst) != seen || stopping_; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stopping_) return;
    seen = job_.load(std::memory_order_acquire);
    drain(thread, seen);
  }
}

}  // namespace ksana
