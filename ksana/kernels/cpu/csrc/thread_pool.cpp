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

uint64_t job_of(uint64_t state) { return state >> kCountBits; }

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
  const uint64_t seen = job_of(state_);
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, seen] { work(seen); });
  } catch (const std::exception&) {  // of a limit on threads or memory
  }
  const int size = static_cast<int>(workers_.size()) + 1;
  size_.store(size, std::memory_order_relaxed);
  return size;
}

void ThreadPool::launch(int64_t count, Function function, const void* context) {
  count_ = count;
  function_ = function;
  context_ = context;
  unfinished_.store(count, std::memory_order_relaxed);
  const uint64_t job = (job_of(state_.load(std::memory_order_relaxed)) + 1) & kCountMask;
  state_.store(job << kCountBits | static_cast<uint64_t>(count), std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
    }
    wake_.notify_all();
  }
  drain(job);
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0;) {
    if (++spins < kCallerSpins)
      pause();
    else
      std::this_thread::yield();
  }
}

bool ThreadPool::take(uint64_t job, int64_t* index) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (job_of(state) == job && (state & kCountMask) != 0) {
    if (state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) {
      *index = count_ - static_cast<int64_t>(state & kCountMask);
      return true;
    }
  }
  return false;
}

void ThreadPool::drain(uint64_t job) {
  for (int64_t index; take(job, &index);) {
    function_(context_, index);
    unfinished_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::work(uint64_t seen) {
  while (true) {
    for (int spins = 0; job_of(state_.load(std::memory_order_acquire)) == seen && !stopping_;) {
      if (++spins < kWorkerSpins) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return job_of(state_.load(std::memory_order_seq_cst)) != seen || stopping_; });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stopping_) return;
    seen = job_of(state_.load(std::memory_order_acquire));
    drain(seen);
  }
}

}  // namespace ksana
