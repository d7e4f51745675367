// The kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "level_includes.h"

#ifdef KSANA_X86_LEVELS

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#define KSANA_LEVEL_NAME "avx512"
#define KSANA_AVX512

namespace ksana {
namespace avx512 {
#include "level.inl"
}
const Kernels avx512_kernels = avx512::level_kernels;
}  // namespace ksana

#endif
