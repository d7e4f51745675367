// The kernels for processors with AVX2 and FMA.
#include "level_includes.h"

#ifdef KSANA_X86_LEVELS

#pragma GCC target("avx2,fma")
#define KSANA_LEVEL_NAME "avx2"
#define KSANA_AVX2

namespace ksana {
namespace avx2 {
#include "level.inl"
}
const Kernels avx2_kernels = avx2::level_kernels;
}  // namespace ksana

#endif
