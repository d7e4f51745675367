// Plain C entry points for ctypes, and the choice of instruction set.

#include <cstdint>

#include "abi.h"
#include "kernels.h"
#include "limits.h"
#include "stopwatch.h"
#include "thread_pool.h"

namespace ksana {

const char* const kOperatorNames[kNumOperators] = {
    "norm", "qkv", "rotary_and_cache_write", "attention", "attention_output", "gate_up", "down", "linear", "sampling"};
std::atomic<double> operator_seconds[kNumOperators] = {};

namespace {

#ifdef KSANA_X86_LEVELS
const Kernels* const kLevels[] = {&portable_kernels, &avx2_kernels, &avx512_kernels, &avx512_bf16_kernels};
#else
const Kernels* const kLevels[] = {&portable_kernels};
#endif

int best_level() {
#ifdef KSANA_X86_LEVELS
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) return 3;
  if (avx512) return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int level = -1;

const Kernels& kernels() {
  if (level < 0) level = best_level();
  return *kLevels[level];
}

DType dtype(int32_t type) { return static_cast<DType>(type); }

}  // namespace
}  // namespace ksana

using ksana::dtype;
using ksana::Layer;
using ksana::Linear;
using ksana::Step;

#define KSANA_EXPORT extern "C" __attribute__((visibility("default")))

KSANA_EXPORT int ksana_cpu_abi() { return ksana::kAbiVersion; }

// Levels: 0 portable, 1 avx2, 2 avx512, 3 avx512_bf16; this is the best one that the processor has.
KSANA_EXPORT int ksana_cpu_best_level() { return ksana::best_level(); }

KSANA_EXPORT const char* ksana_cpu_level_name() { return ksana::kernels().name; }

// Use another level than the best; returns 0 if the processor lacks it. Weights must be packed anew.
KSANA_EXPORT int ksana_cpu_set_level(int level) {
  if (level < 0 || level > ksana::best_level()) return 0;
  ksana::level = level;
  return 1;
}

// Returns how many there are now: fewer if the system gives no more.
KSANA_EXPORT int ksana_cpu_set_threads(int threads) { return ksana::ThreadPool::instance().resize(threads); }

KSANA_EXPORT int ksana_cpu_num_operators() { return ksana::kNumOperators; }

KSANA_EXPORT const char* ksana_cpu_operator_name(int index) { return ksana::kOperatorNames[index]; }

KSANA_EXPORT double ksana_cpu_operator_seconds(int index) { return ksana::operator_seconds[index]; }

KSANA_EXPORT int64_t ksana_cpu_packed_bytes(int32_t type, const Linear* linear) {
  return ksana::kernels().packed_bytes(dtype(type), *linear);
}

KSANA_EXPORT void ksana_cpu_pack(int32_t type, const Linear* linear, const void* weight, void* packed) {
  ksana::kernels().pack(dtype(type), *linear, weight, packed);
}

KSANA_EXPORT void ksana_cpu_pack_codes(int32_t type, const Linear* linear, const uint8_t* codes, const float* scales,
                                       const float* minima, void* packed) {
  ksana::kernels().pack_codes(dtype(type), *linear, codes, scales, minima, packed);
}

// Rows of a packed weight of the plain format, not interleaved: out [m, in_features].
KSANA_EXPORT void ksana_cpu_embed(int32_t type, const Linear* linear, const int64_t* rows, int64_t m, void* out) {
  ksana::kernels().embed(dtype(type), *linear, rows, m, out);
}

KSANA_EXPORT void ksana_cpu_linear(int32_t type, const void* x, int64_t rows, const Linear* linear, float* out) {
  ksana::kernels().linear(dtype(type), x, rows, *linear, out);
}

// What ksana_cpu_argmax finds in the product of ksana_cpu_linear.
KSANA_EXPORT void ksana_cpu_likeliest(int32_t type, const void* x, int64_t rows, const Linear* linear, int64_t* ids,
                                      uint8_t* finite) {
  ksana::kernels().likeliest(dtype(type), x, rows, *linear, ids, finite);
}

// values = cap * tanh(values / cap)
KSANA_EXPORT void ksana_cpu_soft_cap(float* values, int64_t count, float cap) {
  ksana::kernels().soft_cap(values, count, cap);
}

KSANA_EXPORT void ksana_cpu_rms_norm(int32_t type, const void* x, const float* weight, int64_t rows, int64_t n,
                                     float eps, void* out) {
  ksana::kernels().rms_norm(dtype(type), x, weight, rows, n, eps, out);
}

KSANA_EXPORT void ksana_cpu_write_kv(int32_t type, const Layer* layer, const Step* step, const void* kv, void* cache) {
  ksana::kernels().write_kv(dtype(type), *layer, *step, kv, cache);
}

KSANA_EXPORT void ksana_cpu_attention(int32_t type, const Layer* layer, const Step* step, const void* query,
                                      const void* cache, void* out) {
  ksana::kernels().attention(dtype(type), *layer, *step, query, cache, out);
}

// Steps and caches: one for each layer. rows: those of the batch, ascending, that the last layer's result is wanted
// for; they are the first rows of hidden afterwards. A negative num_rows: all.
KSANA_EXPORT void ksana_cpu_decoder_layers(int32_t type, const Layer* const* layers, const Step* const* steps,
                                           void* const* caches, int64_t count, const int64_t* rows, int64_t num_rows,
                                           void* hidden) {
  ksana::kernels().decoder_layers(dtype(type), layers, steps, caches, count, rows, num_rows, hidden);
}

KSANA_EXPORT void ksana_cpu_argmax(const float* logits, int64_t rows, int64_t n, int64_t* ids, uint8_t* finite) {
  ksana::kernels().argmax(logits, rows, n, ids, finite);
}

KSANA_EXPORT void ksana_cpu_exp_sums(const float* logits, int64_t rows, int64_t n, const float* temperatures,
                                     double* sums) {
  ksana::kernels().exp_sums(logits, rows, n, temperatures, sums);
}

KSANA_EXPORT void ksana_cpu_draw(const float* logits, int64_t rows, int64_t n, const float* temperatures,
                                 const float* min_ps, const double* uniforms, int64_t* ids) {
  ksana::kernels().draw(logits, rows, n, temperatures, min_ps, uniforms, ids);
}

KSANA_EXPORT void ksana_cpu_top_k(const float* logits, int64_t rows, int64_t n, int64_t k, float* values,
                                  int64_t* ids) {
  ksana::kernels().top_k(logits, rows, n, k, values, ids);
}

KSANA_EXPORT double ksana_cpu_read_bandwidth(int64_t bytes, int32_t repeats) {
  return ksana::read_bandwidth(bytes, repeats);
}

KSANA_EXPORT double ksana_cpu_gemm_peak(int32_t type, int32_t repeats) {
  return ksana::product_peak(ksana::kernels(), dtype(type), repeats);
}
