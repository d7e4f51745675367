// Operators that go through rows: norms, rotary embedding with the write to the cache.

// 1 / rms(x)
template <class T>
inline float rms_scale(const T* x, int64_t n, float eps) {
  vf squares = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const vf values = load(x + i);
    squares += values * values;
  }
  float rest = 0;
  for (int64_t j = i; j < n; ++j) rest += to_float(x[j]) * to_float(x[j]);
  return 1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(n) + eps);
}

// out = x / rms(x) * weight (Zhang and Sennrich 2019); may be in place
template <class T>
inline void rms_norm_row(const T* x, const float* weight, int64_t n, float eps, T* out) {
  const float scale = rms_scale(x, n, eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = from_float<T>(to_float(x[i]) * scale * weight[i]);
}

// out += x / rms(x) * weight
template <class T>
inline void rms_norm_add_row(const T* x, const float* weight, int64_t n, float eps, T* out) {
  const float scale = rms_scale(x, n, eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(out + i) + load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = from_float<T>(to_float(out[i]) + to_float(x[i]) * scale * weight[i]);
}

// Calls body(row) for each of m short rows, on all threads.
template <class Body>
inline void each_short_row(int64_t m, const Body& body) {
  const int64_t rows = 16;  // worth the way to another thread
  ThreadPool::instance().run(cdiv(m, rows), [&](int64_t task) {
    for (int64_t row = task * rows; row < min64(m, (task + 1) * rows); ++row) body(row);
  });
}

template <class T>
void rms_norm(const T* x, const float* weight, int64_t m, int64_t n, float eps, T* out) {
  each_short_row(m, [&](int64_t row) { rms_norm_row(x + row * n, weight, n, eps, out + row * n); });
}

template <class T>
void rms_norm_add(const T* x, const float* weight, int64_t m, int64_t n, float eps, T* out) {
  each_short_row(m, [&](int64_t row) { rms_norm_add_row(x + row * n, weight, n, eps, out + row * n); });
}

// values = cap * tanh(values / cap)
inline void soft_cap(float* values, int64_t count, float cap) {
  const int64_t size = 8192;
  const float scale = 1.0f / cap;
  ThreadPool::instance().run(cdiv(count, size), [&](int64_t task) {
    const int64_t end = min64(count, (task + 1) * size);
    int64_t i = task * size;
    for (; i + kLanes <= end; i += kLanes) store(values + i, cap * tanh(load(values + i) * scale));
    for (; i < end; ++i) values[i] = (cap * tanh(splat(values[i] * scale)))[0];
  });
}

// Rotary position embedding (Su et al. 2021) of one head, in place: x * cos + (its halves exchanged) * sin. The first
// half of `sin` is negated already.
template <class T>
inline void rotate(T* x, const T* cos, const T* sin, int64_t head_size) {
  const int64_t half = head_size / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf a = load(x + i), b = load(x + half + i);
    store(x + i, a * load(cos + i) + b * load(sin + i));
    store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    x[i] = from_float<T>(a * to_float(cos[i]) + b * to_float(sin[i]));
    x[half + i] = from_float<T>(b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
  }
}

// Norms and rotation of q and k, and the write of k and v to the cache. qkv: [num_tokens, heads + 2 kv heads,
// head_size].
template <class T>
void rotate_and_write(const Layer& layer, const Step& step, T* qkv, void* cache) {
  const int64_t d = layer.head_size, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
  const int64_t row_size = (heads + 2 * kv_heads) * d, tokens = 4;
  const CacheLayout layout(step.block_size, kv_heads, d, Inner<T>::width);
  ThreadPool::instance().run(cdiv(step.num_tokens, tokens), [&](int64_t task) {
    for (int64_t t = task * tokens; t < min64(step.num_tokens, (task + 1) * tokens); ++t) {
      T* row = qkv + t * row_size;
      for (int64_t head = 0; head < heads + kv_heads; ++head) {
        const float* norm = head < heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm_row(row + head * d, norm, d, layer.eps, row + head * d);
        rotate(row + head * d, static_cast<const T*>(step.cos) + t * d, static_cast<const T*>(step.sin) + t * d, d);
      }
      write_token(layout, step.cache_dtype, layer.kv_scale, step.slot_mapping[t], row + heads * d, cache);
    }
  });
}
