// Paged attention with grouped queries, a causal mask, and optionally a sliding window and a soft cap.
//
// Softmax goes along with the sums, as in FlashAttention (Dao et al. 2022). Keys come in blocks of kKeyBlock that begin
// at multiples of it, counted from the start of the sequence, and in a block everything has its place: a query's result
// does not depend on the queries it is computed with, nor on where a prompt was cut.

constexpr int kTileKeys = kLanes;
constexpr int kBlockTiles = 4;
constexpr int kKeyBlock = kBlockTiles * kTileKeys;
#if defined(KSANA_AVX512)
constexpr int kTileRows = 6;  // query rows (queries by heads that share a key head) in registers
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTaskRows = 32;  // those for which a task reads the keys once

// Sixteen keys and values of one head, as they lie in the cache.
template <class T>
struct KeyTile {
  const T* keys;
  const T* values;
};

// What a task does: queries [first, last) of a request, as rows of the batch, for one key head.
struct AttentionTask {
  int64_t request, first, last, kv_head;
};

// The keys that a task reads: [oldest, end) of one head of one request.
struct KeyRange {
  const int64_t* table;
  int64_t kv_head, oldest, end;

  KeyRange(const Step& step, const AttentionTask& task)
      : table(step.block_tables + task.request * step.block_table_stride), kv_head(task.kv_head) {
    const int64_t offset = step.context_lens[task.request] - step.query_starts[task.request];
    end = task.last + offset;
    oldest = oldest_key(step, task.first + offset);
  }

  int64_t first_block() const { return oldest / kKeyBlock * kKeyBlock; }
};

// Rows of the batch that are wanted, in ascending order; a negative count: all of them.
struct Rows {
  const int64_t* ids;
  int64_t count;

  bool all(const Step& step) const { return count < 0 || count == step.num_tokens; }
};

// Finds keys and values.
template <class T>
struct TileReader {
  static constexpr int width = Inner<T>::width;
  static constexpr int64_t kBuffers = 2 * kBlockTiles;

  const CacheLayout& layout;
  const void* cache;
  int32_t dtype;
  KeyRange range;       // what may be read, with whatever shares a tile and a block with one of its keys
  int64_t padded_size;  // head_size, rounded up to whole vectors: of a value in a buffer
  T* buffers;           // kBuffers of 16 * padded_size each

  // Tile number `tile` of those that begin at `start`.
  KeyTile<T> read(int64_t start, int tile) const {
    const int64_t first = start + tile * kTileKeys, size = kTileKeys * padded_size;
    T* keys = buffers + 2 * tile * size;
    T* values = keys + size;
    if (first >= range.end || first + kTileKeys <= range.oldest) {
      __builtin_memset(values, 0, size * sizeof(T));
      if (in_place()) return {place(range, first).keys, values};
      __builtin_memset(keys, 0, size * sizeof(T));
      return {keys, values};
    }
    if (!layout.in_tiles()) {
      gather(first, keys, values);
      return {keys, values};
    }
    KeyTile<T> found;
    if (in_place()) {
      found = place(range, first);
    } else {
      const int64_t block = range.table[first / layout.block_size], offset = first % layout.block_size;
      found = dtype == kFloat8E4M3 ? decode<E4M3>(block, offset, keys, values)
                                   : decode<E5M2>(block, offset, keys, values);
    }
    // What lies behind the last key may be anything, and 0 times anything is not 0. As scores, such keys are masked.
    if (first + kTileKeys > range.end) found.values = without_tail(found.values, range.end - first, values);
    return found;
  }

  // Where the tiles from `start` on lie that will be read, for fetching them early; null if they are not used in place.
  const KeyTile<T>* locate(const KeyRange& wanted, int64_t start, KeyTile<T> (&found)[kBlockTiles]) const {
    if (!in_place()) return nullptr;
    for (int t = 0; t < kBlockTiles; ++t) found[t] = place(wanted, start + t * kTileKeys);
    return found;
  }

  // From one step over the inner dimension to the next in the keys of every tile that read() finds.
  int64_t key_stride() const { return (in_place() ? layout.block_size : kTileKeys) * width; }

 private:
  // Whether tiles are used where they lie in the cache.
  bool in_place() const { return layout.in_tiles() && dtype != kFloat8E4M3 && dtype != kFloat8E5M2; }

  // The tile with key number `first`, or the nearest one that holds a key of the range.
  KeyTile<T> place(const KeyRange& keys, int64_t first) const {
    first = max64(keys.oldest, min64(first, keys.end - 1)) / kTileKeys * kTileKeys;
    const int64_t block = keys.table[first / layout.block_size], offset = first % layout.block_size;
    const T* data = static_cast<const T*>(cache);
    return {data + layout.keys(block, keys.kv_head) + offset * width,
            data + layout.values(block, keys.kv_head) + offset * layout.head_size};
  }

  // A copy of a tile's values in which those behind the first `count` keys are 0; may be in place.
  const T* without_tail(const T* from, int64_t count, T* to) const {
    const int64_t row = layout.head_size * width, whole = count / width;  // a row holds `width` neighbouring keys
    if (to != from) __builtin_memcpy(to, from, whole * row * sizeof(T));
    __builtin_memset(to + cdiv(count, width) * row, 0, (kTileKeys / width - cdiv(count, width)) * row * sizeof(T));
    if (count % width != 0)
      for (int64_t i = 0; i < row; ++i)
        to[whole * row + i] = i % width < count % width ? from[whole * row + i] : from_float<T>(0);
    return to;
  }

  template <class Format>
  KeyTile<T> decode(int64_t block, int64_t offset, T* keys, T* values) const {
    const uint8_t* data = static_cast<const uint8_t*>(cache);
    const int64_t d = layout.head_size, run = kTileKeys * width;
    const uint8_t* key = data + layout.keys(block, range.kv_head) + offset * width;
    for (int64_t i = 0; i < d / width; ++i)
      for (int64_t j = 0; j < run; j += kLanes)
        store(keys + i * run + j, from_float8<Format>(key + i * layout.block_size * width + j));
    const uint8_t* value = data + layout.values(block, range.kv_head) + offset * d;
    for (int64_t i = 0; i < kTileKeys * d; i += kLanes) store(values + i, from_float8<Format>(value + i));
    return {keys, values};
  }

  float element(int64_t at) const {
    if (dtype == kFloat8E4M3 || dtype == kFloat8E5M2) {
      uint8_t codes[kLanes] = {static_cast<const uint8_t*>(cache)[at]};
      return dtype == kFloat8E4M3 ? from_float8<E4M3>(codes)[0] : from_float8<E5M2>(codes)[0];
    }
    return to_float(static_cast<const T*>(cache)[at]);
  }

  // One key at a time, for blocks and heads that are no multiple of a tile.
  void gather(int64_t first, T* keys, T* values) const {
    const int64_t d = layout.head_size;
    if (d < padded_size) __builtin_memset(values, 0, kTileKeys * padded_size * sizeof(T));
    for (int64_t j = 0; j < kTileKeys; ++j) {
      const int64_t position = first + j;
      const bool wanted = position >= range.oldest && position < range.end;
      const int64_t block = wanted ? range.table[position / layout.block_size] : 0;
      const int64_t offset = position % layout.block_size;
      for (int64_t i = 0; i < d; ++i) {
        float key = 0, value = 0;
        if (wanted) {
          key = element(layout.keys(block, range.kv_head) + layout.in_keys(offset, i));
          value = element(layout.values(block, range.kv_head) + layout.in_values(offset, i));
        }
        keys[(i / width * kTileKeys + j) * width + i % width] = from_float<T>(key);
        values[(j / width * padded_size + i) * width + j % width] = from_float<T>(value);
      }
    }
  }
};

// The running softmax of query rows: of each, the largest score, and the weights' sum, spread over the lanes that they
// fell on.
struct SoftmaxRows {
  float* tops;
  vf* totals;
};

// Query rows so that score() goes through them with one pointer: [head_size / width][Rows][width].
template <class T, int Rows>
inline void pack_queries(const T* const* rows, int64_t head_size, T* out) {
  constexpr int width = Inner<T>::width;
  for (int64_t s = 0; s < head_size / width; ++s)
    for (int r = 0; r < Rows; ++r, out += width) __builtin_memcpy(out, rows[r] + s * width, width * sizeof(T));
}

// scores[r][tile] = q[r] . keys; q: as pack_queries() leaves them; ahead: tiles to be fetched meanwhile, or null
template <class T, int Rows>
inline void score(const T* q, const KeyTile<T>* tiles, const KeyTile<T>* ahead, int64_t key_stride, int64_t head_size,
                  vf (&scores)[Rows][kBlockTiles]) {
  constexpr int width = Inner<T>::width;
  vf acc[Rows][kBlockTiles] = {};
  const T* keys[kBlockTiles];
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTiles; ++t) keys[t] = tiles[t].keys;
  for (int64_t s = 0; s < head_size / width; ++s, q += Rows * width) {
    vf k[kBlockTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTiles; ++t) k[t] = Inner<T>::weights(keys[t] + s * key_stride);
    if (ahead != nullptr) {
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTiles; ++t) fetch(ahead[t].keys + s * key_stride);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const vf b = Inner<T>::broadcast(q + r * width);
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTiles; ++t) acc[r][t] = Inner<T>::dot(acc[r][t], k[t], b);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTiles; ++t) scores[r][t] = acc[r][t];
}

// Scores to soft-capped ones, divided by the cap.
inline void cap(vf (&scores)[kBlockTiles], float scale) {
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTiles; ++t) scores[t] = tanh(scores[t] * scale);
}

// Scores of keys outside [from, to) to -infinity.
inline void hide(vf (&scores)[kBlockTiles], int64_t from, int64_t to) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi low = vi{} + static_cast<int32_t>(max64(0, from)), high = vi{} + static_cast<int32_t>(min64(kKeyBlock, to));
#pragma GCC unroll 4
  for (int t = 0; t < kBlockTiles; ++t) {
    const vi key = lane + t * kTileKeys;
    scores[t] = key < low ? splat(-__builtin_inff()) : (key >= high ? splat(-__builtin_inff()) : scores[t]);
  }
}

// Scores of a few rows to weights. from, to: the keys [from[r], to[r]) of the block are visible to row r. shrink: what
// the rows' sums so far are to be multiplied with. Works in powers of two: `scale` contains the logarithm of e.
template <class T, int Rows>
inline __attribute__((always_inline)) void weigh(vf (&scores)[Rows][kBlockTiles], const Layer& layer,
                                                 const int64_t* from, const int64_t* to, const SoftmaxRows& state,
                                                 T (*weights)[kKeyBlock], float* shrink) {
  const float scale = (layer.soft_cap != 0 ? layer.soft_cap : layer.scale) * kLog2E;
  alignas(64) float tops[kLanes] = {}, before[kLanes] = {}, bases[kLanes], factors[kLanes];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    if (layer.soft_cap != 0) cap(scores[r], layer.scale / layer.soft_cap);
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTiles; ++t) scores[r][t] *= scale;
    if (from[r] > 0 || to[r] < kKeyBlock) hide(scores[r], from[r], to[r]);
    tops[r] = max_lane(max(max(scores[r][0], scores[r][1]), max(scores[r][2], scores[r][3])));
    before[r] = state.tops[r];
  }
  // A lane for each row, without a branch, which nobody could predict. Two infinities have no difference, and where
  // nothing is visible so far, all weights are 0.
  const vf old = load(before), top = max(load(tops), old);
  store(tops, top);
  store(bases, top == -__builtin_inff() ? vf{} : top);
  store(factors, exp2(top == old ? vf{} : old - top));
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const vf base = splat(bases[r]);
    vf mass = {};
#pragma GCC unroll 4
    for (int t = 0; t < kBlockTiles; ++t) {
      const vf p = exp2(scores[r][t] - base);
      store(weights[r] + t * kTileKeys, p);
      mass += p;
    }
    state.tops[r] = tops[r];
    state.totals[r] = state.totals[r] * factors[r] + mass;
    shrink[r] = factors[r];
  }
}

// sums[r] = sums[r] * shrink[r] + weights[r] . values, for up to four vectors of the head.
template <class T, int Rows, int Vectors>
inline void gather_values(const T (*weights)[kKeyBlock], const KeyTile<T>* tiles, const KeyTile<T>* ahead,
                          int num_tiles, int64_t head_size, int64_t first, const float* shrink, float* sums) {
  constexpr int width = Inner<T>::width;
  vf acc[Rows][Vectors] = {};
  for (int t = 0; t < num_tiles; ++t)
    for (int s = 0; s < kTileKeys / width; ++s) {
      vf values[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        values[v] = Inner<T>::weights(tiles[t].values + (s * head_size + first + v * kLanes) * width);
      if (ahead != nullptr) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) fetch(ahead[t].values + (s * head_size + first + v * kLanes) * width);
      }
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const vf b = Inner<T>::broadcast(weights[r] + t * kTileKeys + s * width);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) acc[r][v] = Inner<T>::dot(acc[r][v], values[v], b);
      }
    }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      float* at = sums + r * head_size + first + v * kLanes;
      store(at, load(at) * shrink[r] + acc[r][v]);
    }
}

// One block of keys for a few query rows. ahead: as for score(); from, to: per row, as for weigh().
template <class T, int Rows>
inline void attend_block(const Layer& layer, const T* q, const KeyTile<T>* tiles, const KeyTile<T>* ahead,
                         int64_t key_stride, int num_tiles, const int64_t* from, const int64_t* to,
                         const SoftmaxRows& state, float* sums) {
  const int64_t d = cdiv(layer.head_size, kLanes) * kLanes;
  vf scores[Rows][kBlockTiles];
  score<T, Rows>(q, tiles, ahead, key_stride, layer.head_size, scores);
  alignas(64) T weights[Rows][kKeyBlock];
  float shrink[Rows];
  weigh<T, Rows>(scores, layer, from, to, state, weights, shrink);
  int64_t i = 0;
  for (; i + 4 * kLanes <= d; i += 4 * kLanes)
    gather_values<T, Rows, 4>(weights, tiles, ahead, num_tiles, d, i, shrink, sums);
  for (; i < d; i += kLanes) gather_values<T, Rows, 1>(weights, tiles, ahead, num_tiles, d, i, shrink, sums);
}

// qkv: [num_tokens, heads + 2 kv heads, head_size] with q rotated; out: [num_tokens, heads, head_size]; next: the task
// that probably follows.
template <class T>
void attend(const Layer& layer, const Step& step, const AttentionTask& task, const AttentionTask& next, const T* qkv,
            int64_t row_size, const void* cache, T* out) {
  const int64_t d = layer.head_size, kv_heads = layer.num_kv_heads, group = layer.num_heads / kv_heads;
  const KeyRange range(step, task), next_range(step, next);
  const int64_t end = range.end, position = end - (task.last - task.first);
  const int64_t rows = (task.last - task.first) * group;
  const int64_t window = step.window ? step.window : end;

  const CacheLayout layout(step.block_size, kv_heads, d, Inner<T>::width);
  const int64_t padded_size = cdiv(d, kLanes) * kLanes;
  const int64_t buffer_bytes = TileReader<T>::kBuffers * kTileKeys * padded_size * sizeof(T);
  const int64_t row_bytes = (padded_size + 1) * sizeof(float) + sizeof(vf) + sizeof(int64_t) + d * sizeof(T);
  char* memory = static_cast<char*>(scratch_bytes(Scratch::kAttention, buffer_bytes + rows * row_bytes));
  T* buffers = reinterpret_cast<T*>(memory);
  float* sums = reinterpret_cast<float*>(memory + buffer_bytes);
  vf* totals = reinterpret_cast<vf*>(sums + rows * padded_size);
  int64_t* ends = reinterpret_cast<int64_t*>(totals + rows);  // of the keys that a row sees
  float* tops = reinterpret_cast<float*>(ends + rows);
  T* queries = reinterpret_cast<T*>(tops + rows);
  __builtin_memset(sums, 0, rows * padded_size * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    tops[r] = -__builtin_inff();
    totals[r] = vf{};
  }
  const TileReader<T> reader{layout, cache, step.cache_dtype, range, padded_size, buffers};

  const int64_t tile_rows = cdiv(rows, cdiv(rows, kTileRows));
  const auto each_row_tile = [&](const auto& body) {
    for (int64_t first = 0; first < rows; first += tile_rows)
      with_rows<kTileRows>(static_cast<int>(min64(tile_rows, rows - first)), [&](auto n) { body(n, first); });
  };
  each_row_tile([&](auto n, int64_t first) {
    const T* q[n.value];
    for (int r = 0; r < n.value; ++r) {
      const int64_t query = (first + r) / group, head = task.kv_head * group + (first + r) % group;
      q[r] = qkv + (task.first + query) * row_size + head * d;
      ends[first + r] = position + query + 1;
    }
    pack_queries<T, n.value>(q, d, queries + first * d);
  });
  for (int64_t block = range.first_block(); block < end; block += kKeyBlock) {
    KeyTile<T> tiles[kBlockTiles], later[kBlockTiles];
    for (int t = 0; t < kBlockTiles; ++t) tiles[t] = reader.read(block, t);
    const KeyTile<T>* ahead = block + kKeyBlock < end ? reader.locate(range, block + kKeyBlock, later)
                                                      : reader.locate(next_range, next_range.first_block(), later);
    const int num_tiles = static_cast<int>(min64(kBlockTiles, cdiv(end - block, kTileKeys)));
    each_row_tile([&](auto n, int64_t first) {
      int64_t from[n.value], to[n.value];
      for (int r = 0; r < n.value; ++r) {
        to[r] = ends[first + r] - block;
        from[r] = to[r] - window;
      }
      if (to[n.value - 1] <= 0 || from[0] >= kKeyBlock) return;  // all of it lies ahead of, or behind, these queries
      attend_block<T, n.value>(layer, queries + first * d, tiles, ahead, reader.key_stride(), num_tiles, from, to,
                               SoftmaxRows{tops + first, totals + first}, sums + first * padded_size);
      ahead = nullptr;  // once is enough
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* to = out + ((task.first + r / group) * layer.num_heads + task.kv_head * group + r % group) * d;
    const float scale = layer.kv_scale / sum(totals[r]);
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) store(to + i, load(sums + r * padded_size + i) * scale);
    if (i < d) store_some(to + i, load(sums + r * padded_size + i) * scale, static_cast<int>(d - i));
  }
}

inline AttentionTask* add_tasks(AttentionTask* tasks, int64_t request, int64_t first, int64_t last, int64_t queries,
                                int64_t kv_heads) {
  const int64_t count = last - first, parts = cdiv(count, queries);
  for (int64_t head = 0; head < kv_heads; ++head)
    for (int64_t i = 0; i < parts; ++i)
      *tasks++ = {request, first + count * i / parts, first + count * (i + 1) / parts, head};
  return tasks;
}

// Attention of all queries of the batch, or of some rows of it, in ascending order.
template <class T>
void attention(const Layer& layer, const Step& step, const Rows& rows, const T* qkv, int64_t row_size,
               const void* cache, T* out) {
  const int64_t kv_heads = layer.num_kv_heads, queries = max64(1, kTaskRows / (layer.num_heads / kv_heads));
  const int64_t most = step.num_tokens / queries + step.num_requests + max64(0, rows.count);
  AttentionTask* tasks = scratch<AttentionTask>(Scratch::kTasks, most * kv_heads);
  AttentionTask* end = tasks;
  if (rows.all(step)) {
    for (int64_t r = 0; r < step.num_requests; ++r)
      end = add_tasks(end, r, step.query_starts[r], step.query_starts[r + 1], queries, kv_heads);
  } else {
    for (int64_t i = 0, r = 0; i < rows.count; ++i) {
      while (step.query_starts[r + 1] <= rows.ids[i]) ++r;
      end = add_tasks(end, r, rows.ids[i], rows.ids[i] + 1, queries, kv_heads);
    }
  }
  const int64_t count = end - tasks;
  ThreadPool::instance().run(count, [&](int64_t i) {
    attend(layer, step, tasks[i], tasks[min64(i + 1, count - 1)], qkv, row_size, cache, out);
  });
}
