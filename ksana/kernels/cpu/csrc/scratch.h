// Memory that a thread needs for the time of one call, kept for the next.
#pragma once

#include <cstddef>

namespace ksana {

enum class Scratch { kNormed, kWide, kRowSums, kUnpacked, kAttention, kTasks, kMaxima, kCount };

// At least `bytes` bytes for the calling thread, aligned to a cache line; the contents are undefined. What an earlier
// call for the same purpose returned is no longer valid.
void* scratch_bytes(Scratch purpose, size_t bytes);

template <class T>
T* scratch(Scratch purpose, size_t count) {
  return static_cast<T*>(scratch_bytes(purpose, count * sizeof(T)));
}

}  // namespace ksana
