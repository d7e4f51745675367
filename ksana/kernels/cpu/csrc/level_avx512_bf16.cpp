// The kernels for processors with AVX-512, its products of bfloat16 and its tables of bytes (VBMI).
#include "level_includes.h"

#ifdef KSANA_X86_LEVELS

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,fma")
#define KSANA_LEVEL_NAME "avx512_bf16"
#define KSANA_AVX512
#define KSANA_BF16

namespace ksana {
namespace avx512_bf16 {
#include "level.inl"
}
const Kernels avx512_bf16_kernels = avx512_bf16::level_kernels;
}  // namespace ksana

#endif
