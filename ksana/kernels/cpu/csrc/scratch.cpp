#include "scratch.h"

#include <cstdlib>
#include <new>

namespace ksana {
namespace {

constexpr size_t kAlignment = 64;

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void* scratch_bytes(Scratch purpose, size_t bytes) {
  static thread_local Buffer buffers[static_cast<size_t>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<size_t>(purpose)];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.data = std::aligned_alloc(kAlignment, buffer.size);
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace ksana
