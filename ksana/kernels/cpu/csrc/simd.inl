// Vectors of sixteen floats in the compiler's own notation: an instruction set without such registers gets several
// smaller ones.

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t half_unaligned __attribute__((vector_size(32), aligned(2), may_alias));

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline float to_float(float x) { return x; }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline vf splat(float x) { return x - vf{}; }  // x + 0 is an addition: it makes -0 a 0
inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline vf load(const bf16* p) {
#if defined(KSANA_AVX512)  // compilers make six instructions of the conversion
  __m256i bits;
  __builtin_memcpy(&bits, p, 32);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
  return (vf)(__builtin_convertvector(*reinterpret_cast<const half_unaligned*>(p), vu) << 16);
#endif
}
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline void store(bf16* p, vf x) {
#ifdef KSANA_BF16
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  __builtin_memcpy(p, &rounded, 32);
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu quiet = (bits >> 16) | 0x40;
  const vu result = (bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded;
  typedef uint16_t half __attribute__((vector_size(32)));
  *reinterpret_cast<half_unaligned*>(p) = (half_unaligned) __builtin_convertvector(result, half);
#endif
}
inline vf load_some(const float* p, int64_t count, float filler) {
  alignas(64) float values[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = lane < count ? p[lane] : filler;
  return load(values);
}
template <class T>
inline void store_some(T* p, vf x, int count) {
  for (int i = 0; i < count; ++i) p[i] = from_float<T>(x[i]);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

// The lanes' sum, and the largest of them, always in the same tree: lane i meets lane i + 8, then i + 4 and so on.
#if defined(KSANA_AVX512)
template <int Width>
inline vf upper_to_lower(vf x) {
  constexpr int w = Width;
  return __builtin_shuffle(x, vi{w, w + 1, w + 2, w + 3, w + 4, w + 5, w + 6, w + 7, 8, 9, 10, 11, 12, 13, 14, 15});
}
inline float sum(vf x) {
  x += upper_to_lower<8>(x);
  x += upper_to_lower<4>(x);
  x += upper_to_lower<2>(x);
  x += upper_to_lower<1>(x);
  return x[0];
}
inline float max_lane(vf x) {
  x = max(x, upper_to_lower<8>(x));
  x = max(x, upper_to_lower<4>(x));
  x = max(x, upper_to_lower<2>(x));
  x = max(x, upper_to_lower<1>(x));
  return x[0];
}
#else
inline float sum(vf x) {
  alignas(64) float a[kLanes];
  store(a, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}
inline float max_lane(vf x) {
  alignas(64) float a[kLanes];
  store(a, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
}
#endif

// 2 to the power of r in [-1/2, 1/2]: of the polynomials of degree 5 that are 1 at 0, the one with the least relative
// error, below 1e-7.
inline vf exp2_of_fraction(vf r) {
  vf p = splat(1.3264727197e-3f);
  p = p * r + 9.6715126396e-3f;
  p = p * r + 5.5507337433e-2f;
  p = p * r + 2.4022242085e-1f;
  p = p * r + 6.9314697760e-1f;
  return p * r + 1.0f;
}

// 2 to the power of x for x <= 0 or so, to about 2e-7; below -126 it is 0, -infinity included.
inline vf exp2(vf x) {
#if defined(KSANA_AVX512)
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);  // or NaN
  const __m512 bounded = _mm512_maskz_min_ps(kept, (__m512)splat(127.0f), (__m512)x);
  const __m512 whole = _mm512_maskz_roundscale_ps(kept, bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (vf)_mm512_maskz_scalef_ps(kept, (__m512)exp2_of_fraction((vf)bounded - (vf)whole), whole);
#else
  const vf bounded = x > 127.0f ? splat(127.0f) : (x < -126.0f ? splat(-126.0f) : x);
  const vf shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the rounded integer
  const vf p = exp2_of_fraction(bounded - (shifted - 12582912.0f));
  const vf power = (vf)((vi)p + ((vi)shifted << 23));
  return x < -126.0f ? vf{} : power;
#endif
}

constexpr float kLog2E = 1.4426950408889634f;

inline vf exp(vf x) { return exp2(x * kLog2E); }

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf tanh(vf x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

inline vf silu(vf x) { return x * sigmoid(x); }

// By tanh (Hendrycks and Gimpel 2016): x / 2 * (1 + tanh(u)), which is x * sigmoid(2 * u).
inline vf gelu(vf x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }

// A step over the inner dimension of a product. bfloat16 goes two at a time: neighbours make one 32-bit lane.
template <class T>
struct Inner;

template <>
struct Inner<float> {
  static constexpr int width = 1;
  static vf dot(vf acc, vf w, vf x) { return acc + w * x; }
  static vf broadcast(const float* x) { return splat(*x); }
  static vf weights(const float* w) { return load(w); }
};

template <>
struct Inner<bf16> {
  static constexpr int width = 2;
#ifdef KSANA_BF16
  static vf dot(vf acc, vf w, vf x) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x); }
#else
  static vf dot(vf acc, vf w, vf x) {
    const vi high = vi{} + static_cast<int32_t>(0xffff0000u);
    acc = acc + (vf)((vi)w & high) * (vf)((vi)x & high);
    return acc + (vf)((vi)w << 16) * (vf)((vi)x << 16);
  }
#endif
  static vf broadcast(const bf16* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return (vf)(vi{} + pair);
  }
  static vf weights(const bf16* w) { return *reinterpret_cast<const vf_unaligned*>(w); }
};
