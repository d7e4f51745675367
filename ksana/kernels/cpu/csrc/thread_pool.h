// One pool of threads for all kernels. Workers spin for a moment after each job, since the next one is usually only
// microseconds away, and then sleep.
//
// Every thread has a share of a job's tasks, neighbours of each other, and helps the others when it is done with it: as
// long as jobs divide the same rows, a thread finds in its own caches what it has written in the job before.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ksana {

class ThreadPool {
 public:
  // Of the process. A forked one, which has none of its parent's threads, begins with a new pool of one.
  static ThreadPool& instance();

  // Threads that work on a job, the caller among them.
  int size() const { return size_.load(std::memory_order_relaxed); }

  // Fewer if the system gives no more; returns how many there are now.
  int resize(int threads);

  // Calls task(i) for every i in [0, count), on all threads, in no particular order, and returns when all are done. A
  // caller that finds the pool busy with another caller's job does its own alone.
  template <class Task>
  void run(int64_t count, const Task& task) {
    if (count <= 0) return;
    if (count > 1 && size() > 1 && mutex_.try_lock()) {
      launch(count, [](const void* context, int64_t i) { (*static_cast<const Task*>(context))(i); }, &task);
      mutex_.unlock();
      return;
    }
    for (int64_t i = 0; i < count; ++i) task(i);
  }

  ~ThreadPool() { resize(1); }

 private:
  using Function = void (*)(const void*, int64_t);

  // The job's number and how many tasks of the share nobody has taken yet. Both in one word: a worker that wakes up
  // late finds either tasks of a job whose description below still stands, or none. On cache lines of its own.
  struct alignas(128) Share {
    std::atomic<uint64_t> state{0};

    int64_t take(uint64_t job);
  };

  void launch(int64_t count, Function function, const void* context);
  int64_t first_task(int64_t share) const { return count_ * share / size(); }
  void drain(int thread, uint64_t job);
  void work(int thread, uint64_t seen);

  std::vector<std::thread> workers_;
  std::atomic<int> size_{1};  // for callers, who may come while the pool changes
  std::mutex mutex_;          // held by the caller whose job runs
  std::unique_ptr<Share[]> shares_;

  std::atomic<uint64_t> job_{0};  // its number
  std::atomic<int64_t> unfinished_{0};
  int64_t count_ = 0;
  Function function_ = nullptr;
  const void* context_ = nullptr;

  std::atomic<bool> stopping_{false};
  std::atomic<int> sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace ksana
