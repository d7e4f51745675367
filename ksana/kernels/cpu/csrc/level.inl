// All kernels, and the table of them. The including file has opened a namespace and said which instructions may be
// used.

#include "simd.inl"
#include "fetch.inl"
#include "linear.inl"
#include "cache.inl"
#include "elementwise.inl"
#include "attention.inl"
#include "sampling.inl"
#include "layer.inl"

// Calls body with the C++ type of `type`.
template <class Body>
inline auto with_type(DType type, const Body& body) {
  return type == kBFloat16 ? body(bf16{}) : body(float{});
}

inline int64_t packed_bytes(DType type, const Linear& linear) {
  const int64_t panels = num_panels(linear), k = linear.in_features;
  if (linear.format == kPlain)
    return panels * kPanel * (type == kBFloat16 ? 2 * padded<bf16>(k) : 4 * padded<float>(k));
  const int64_t groups = cdiv(k, linear.group_size);
  return panels * groups *
         (linear.format == kInt8 ? group_bytes<Int8>(linear.group_size) : group_bytes<Int4>(linear.group_size));
}

// Calls body(row) for every row of logits, on all threads.
template <class Body>
inline void each_row(int64_t rows, const Body& body) {
  Stopwatch watch;
  ThreadPool::instance().run(rows, body);
  watch.lap(Operator::kSampling);
}

template <class T>
inline double dot_products(int64_t steps) {
  constexpr int64_t laps = 64, row = laps * Inner<T>::width;  // over the same small piece of memory
  alignas(64) T x[kRows * row], weights[2 * kPanel * Inner<T>::width];
  for (int64_t i = 0; i < kRows * row; ++i) x[i] = from_float<T>(static_cast<float>(i % 7));
  for (int64_t i = 0; i < 2 * kPanel * Inner<T>::width; ++i) weights[i] = from_float<T>(static_cast<float>(i % 5));
  vf acc[kRows][kPanelVectors] = {};
  for (int64_t i = 0; i < steps; ++i)
    accumulate<T, kRows>(acc, x, row, laps, [&](int64_t s, int v) __attribute__((always_inline)) {
      return Inner<T>::weights(weights + (s % 2 * kPanelVectors + v) * kLanes * Inner<T>::width);
    });
  vf total = {};
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVectors; ++v) total += acc[r][v];
  volatile float keep = sum(total);
  (void)keep;
  return 2.0 * static_cast<double>(steps * laps) * Inner<T>::width * kRows * kPanel;
}

const Kernels level_kernels = {
    KSANA_LEVEL_NAME,
    [](DType type, const Linear& linear, const void* weight, void* packed) {
      with_type(type, [&](auto t) {
        using T = decltype(t);
        pack(linear, static_cast<const T*>(weight), static_cast<T*>(packed));
      });
    },
    [](DType type, const Linear& linear, const uint8_t* codes, const float* scales, const float* minima, void* packed) {
      with_type(type, [&](auto t) {
        using T = decltype(t);
        if (linear.format == kInt8)
          pack_codes<T, Int8>(linear, codes, scales, minima, static_cast<uint8_t*>(packed));
        else
          pack_codes<T, Int4>(linear, codes, scales, minima, static_cast<uint8_t*>(packed));
      });
    },
    packed_bytes,
    [](DType type, const Linear& linear, const int64_t* rows, int64_t m, void* out) {
      with_type(type, [&](auto t) {
        using T = decltype(t);
        const int64_t n = linear.in_features;
        each_short_row(m, [&](int64_t i) { unpack_row(linear, rows[i], static_cast<T*>(out) + i * n); });
      });
    },
    [](DType type, const void* x, int64_t m, const Linear& linear, float* out) {
      Stopwatch watch;
      with_type(type,
                [&](auto t) { linear_into(static_cast<const decltype(t)*>(x), linear.in_features, m, linear, out); });
      watch.lap(Operator::kLinear);
    },
    [](DType type, const void* x, int64_t m, const Linear& linear, int64_t* ids, uint8_t* finite) {
      Stopwatch watch;
      with_type(type, [&](auto t) { product_maxima(static_cast<const decltype(t)*>(x), m, linear, ids, finite); });
      watch.lap(Operator::kLinear);
    },
    [](float* values, int64_t count, float cap) {
      Stopwatch watch;
      soft_cap(values, count, cap);
      watch.lap(Operator::kLinear);
    },
    [](DType type, const void* x, const float* weight, int64_t m, int64_t n, float eps, void* out) {
      Stopwatch watch;
      with_type(type, [&](auto t) {
        using T = decltype(t);
        rms_norm(static_cast<const T*>(x), weight, m, n, eps, static_cast<T*>(out));
      });
      watch.lap(Operator::kNorm);
    },
    [](DType type, const Layer& layer, const Step& step, const void* kv, void* cache) {
      with_type(type, [&](auto t) {
        using T = decltype(t);
        const CacheLayout layout(step.block_size, layer.num_kv_heads, layer.head_size, Inner<T>::width);
        const int64_t size = 2 * layer.num_kv_heads * layer.head_size;
        for (int64_t i = 0; i < step.num_tokens; ++i)
          write_token(layout, step.cache_dtype, layer.kv_scale, step.slot_mapping[i],
                      static_cast<const T*>(kv) + i * size, cache);
      });
    },
    [](DType type, const Layer& layer, const Step& step, const void* qkv, const void* cache, void* out) {
      Stopwatch watch;
      with_type(type, [&](auto t) {
        using T = decltype(t);
        attention(layer, step, Rows{nullptr, -1}, static_cast<const T*>(qkv), layer.num_heads * layer.head_size, cache,
                  static_cast<T*>(out));
      });
      watch.lap(Operator::kAttention);
    },
    [](DType type, const Layer* const* layers, const Step* const* steps, void* const* caches, int64_t count,
       const int64_t* rows, int64_t num_rows, void* hidden) {
      with_type(type, [&](auto t) {
        decoder_layers(layers, steps, caches, count, Rows{rows, num_rows}, static_cast<decltype(t)*>(hidden));
      });
    },
    [](const float* logits, int64_t rows, int64_t n, int64_t* ids, uint8_t* finite) {
      each_row(rows, [&](int64_t row) {
        const RowMaximum maximum = row_maximum(logits + row * n, n);
        ids[row] = maximum.index;
        finite[row] = maximum.finite;
      });
    },
    [](const float* logits, int64_t rows, int64_t n, const float* temperatures, double* sums) {
      each_row(rows, [&](int64_t row) { sums[row] = exp_sum(logits + row * n, n, temperatures[row]); });
    },
    [](const float* logits, int64_t rows, int64_t n, const float* temperatures, const float* min_ps,
       const double* uniforms, int64_t* ids) {
      each_row(rows, [&](int64_t row) {
        ids[row] = draw(logits + row * n, n, temperatures[row], min_ps[row], uniforms[row]);
      });
    },
    [](const float* logits, int64_t rows, int64_t n, int64_t k, float* values, int64_t* ids) {
      each_row(rows, [&](int64_t row) { top_k(logits + row * n, n, k, values + row * k, ids + row * k); });
    },
    [](DType type, int64_t steps) { return with_type(type, [&](auto t) { return dot_products<decltype(t)>(steps); }); },
};
