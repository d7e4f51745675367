// The table of kernels that every instruction set fills with its own.
#pragma once

#include <cstdint>

#include "abi.h"

namespace ksana {

struct Kernels {
  const char* name;
  void (*pack)(DType, const Linear&, const void* weight, void* packed);
  void (*pack_codes)(DType, const Linear&, const uint8_t* codes, const float* scales, const float* minima,
                     void* packed);
  int64_t (*packed_bytes)(DType, const Linear&);
  void (*embed)(DType, const Linear&, const int64_t* rows, int64_t m, void* out);
  void (*linear)(DType, const void* x, int64_t m, const Linear&, float* out);
  void (*likeliest)(DType, const void* x, int64_t m, const Linear&, int64_t* ids, uint8_t* finite);
  void (*soft_cap)(float* values, int64_t count, float cap);
  void (*rms_norm)(DType, const void* x, const float* weight, int64_t m, int64_t n, float eps, void* out);
  void (*write_kv)(DType, const Layer&, const Step&, const void* kv, void* cache);
  void (*attention)(DType, const Layer&, const Step&, const void* qkv, const void* cache, void* out);
  void (*decoder_layers)(DType, const Layer* const* layers, const Step* const* steps, void* const* caches,
                         int64_t count, const int64_t* rows, int64_t num_rows, void* hidden);
  void (*argmax)(const float* logits, int64_t rows, int64_t n, int64_t* ids, uint8_t* finite);
  void (*exp_sums)(const float* logits, int64_t rows, int64_t n, const float* temperatures, double* sums);
  void (*draw)(const float* logits, int64_t rows, int64_t n, const float* temperatures, const float* min_ps,
               const double* uniforms, int64_t* ids);
  void (*top_k)(const float* logits, int64_t rows, int64_t n, int64_t k, float* values, int64_t* ids);
  // One thread's products of what lies in the first cache; returns how many floating-point operations they are.
  double (*dot_products)(DType, int64_t steps);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KSANA_X86_LEVELS
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_bf16_kernels;
#endif

}  // namespace ksana
