// Decoder layers: norm, attention, norm, gated MLP, with residual connections; some norm what they add, too.

// Moves rows of a matrix to its beginning.
template <class T>
inline void compact(T* matrix, int64_t columns, const Rows& rows) {
  for (int64_t i = 0; i < rows.count; ++i)
    if (rows.ids[i] != i) __builtin_memcpy(matrix + i * columns, matrix + rows.ids[i] * columns, columns * sizeof(T));
}

// hidden [m, out_features] += x @ weight.T + bias, which is normed before if there is a norm, by way of `product`.
template <class T>
inline void add_to_residual(const T* x, int64_t ldx, int64_t m, const Linear& linear, const float* norm, float eps,
                            T* product, T* hidden) {
  if (norm == nullptr) {
    linear_add(x, ldx, m, linear, hidden);
  } else {
    linear_into(x, ldx, m, linear, product);
    rms_norm_add(product, norm, m, linear.out_features, eps, hidden);
  }
}

// One layer; what is behind its attention only for `rows`, which are the first ones of `hidden` afterwards. next: what
// the layer after it reads. Memory has time for it during the MLP; during attention all wait for memory.
template <class T>
void decoder_layer(const Layer& layer, const Step& step, const Rows& rows, const CachedKeys& next, T* hidden,
                   void* cache) {
  const int64_t n = layer.hidden_size, query_size = layer.num_heads * layer.head_size;
  int64_t m = step.num_tokens;
  T* normed = scratch<T>(Scratch::kNormed, m * max64(n, query_size));
  T* wide = scratch<T>(Scratch::kWide, m * max64(n, max64(layer.qkv.out_features, layer.intermediate_size)));
  Stopwatch watch;
  rms_norm(hidden, layer.input_norm, m, n, layer.eps, normed);
  watch.lap(Operator::kNorm);
  linear_into(normed, n, m, layer.qkv, wide);
  watch.lap(Operator::kQkv);
  rotate_and_write(layer, step, wide, cache);
  watch.lap(Operator::kRotary);
  attention(layer, step, rows, wide, layer.qkv.out_features, cache, normed);
  if (!rows.all(step)) {
    compact(normed, query_size, rows);
    compact(hidden, n, rows);
    m = rows.count;
  }
  watch.lap(Operator::kAttention);
  add_to_residual(normed, query_size, m, layer.output, layer.attention_output_norm, layer.eps, wide, hidden);
  watch.lap(Operator::kOutput);
  rms_norm(hidden, layer.mlp_input_norm, m, n, layer.eps, normed);
  watch.lap(Operator::kNorm);
  if (layer.activation == kGelu)
    linear_gated(normed, n, m, layer.gate_up, [](vf x) { return gelu(x); }, next, wide);
  else
    linear_gated(normed, n, m, layer.gate_up, [](vf x) { return silu(x); }, next, wide);
  watch.lap(Operator::kGateUp);
  add_to_residual(wide, layer.intermediate_size, m, layer.down, layer.mlp_output_norm, layer.eps, normed, hidden);
  watch.lap(Operator::kDown);
}

// All layers, one after the other; steps and caches: one for each. The last layer's result is wanted for `rows` only.
template <class T>
void decoder_layers(const Layer* const* layers, const Step* const* steps, void* const* caches, int64_t count,
                    const Rows& rows, T* hidden) {
  const Rows everything{nullptr, -1};
  for (int64_t i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    const CachedKeys next = is_last ? CachedKeys() : CachedKeys(*layers[i + 1], *steps[i + 1], caches[i + 1]);
    decoder_layer(*layers[i], *steps[i], is_last ? rows : everything, next, hidden, caches[i]);
  }
}
