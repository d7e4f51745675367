// Operators that go through rows: norms, rotary embedding with the write to the cache.

// out = x / rms(x) * weight (Zhang and Sennrich 2019); may be in place
template <class T>
inline void rms_norm_row(const T* x, const T* weight, int64_t n, float eps, T* out) {
  vf squares = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const vf values = load(x + i);
    squares += values * values;
  }
  float rest = 0;
  for (int64_t j = i; j < n; ++j) rest += to_float(x[j]) * to_float(x[j]);
  const float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = from_float<T>(to_float(x[i]) * scale * to_float(weight[i]));
}

template <class T>
void rms_norm(const T* x, const T* weight, int64_t m, int64_t n, float eps, T* out) {
  const int64_t rows = 16;  // worth the way to another thread
  ThreadPool::instance().run(cdiv(m, rows), [&](int64_t task) {
    for (int64_t row = task * rows; row < min64(m, (task + 1) * rows); ++row)
      rms_norm_row(x + row * n, weight, n, eps, out + row * n);
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
        const T* norm = static_cast<const T*>(head < heads ? layer.q_norm : layer.k_norm);
        if (norm) rms_norm_row(row + head * d, norm, d, layer.eps, row + head * d);
        rotate(row + head * d, static_cast<const T*>(step.cos) + t * d, static_cast<const T*>(step.sin) + t * d, d);
      }
      write_token(layout, step.cache_dtype, step.slot_mapping[t], row + heads * d, cache);
    }
  });
}
