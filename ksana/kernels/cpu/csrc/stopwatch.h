// Where the time of the kernels goes, by operator, since the library was loaded.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ksana {

enum class Operator { kNorm, kQkv, kRotary, kAttention, kOutput, kGateUp, kDown, kLinear, kSampling, kCount };

constexpr int kNumOperators = static_cast<int>(Operator::kCount);

extern const char* const kOperatorNames[kNumOperators];

// Seconds by operator. Of two threads that compute at once, one may lose a lap.
extern std::atomic<double> operator_seconds[kNumOperators];

class Stopwatch {
 public:
  Stopwatch() : last_(Clock::now()) {}

  // Credits the time since the last lap to an operator.
  void lap(Operator of) {
    const Clock::time_point now = Clock::now();
    std::atomic<double>& total = operator_seconds[static_cast<int>(of)];
    const double lap = std::chrono::duration<double>(now - last_).count();
    total.store(total.load(std::memory_order_relaxed) + lap, std::memory_order_relaxed);
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};

}  // namespace ksana
