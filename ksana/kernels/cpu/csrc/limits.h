// What this machine can do at most.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace ksana {

// Bytes a second that all threads together read from a buffer of that size, the best of `repeats`.
double read_bandwidth(int64_t bytes, int32_t repeats);

// Floating-point operations a second of products on all threads, nothing behind the first cache involved, the best of
// `repeats`.
double product_peak(const Kernels& kernels, DType type, int32_t repeats);

}  // namespace ksana
