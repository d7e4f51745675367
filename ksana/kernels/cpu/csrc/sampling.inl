// What sampling needs of a row of logits. Every row is summed up in one fixed order.

constexpr int64_t kSumChunk = 1024;

struct RowMaximum {
  int64_t index;  // the first of equals
  float value;
  bool finite;  // all of the row
};

// The largest of what was added, lane by lane.
struct LaneMaxima {
  vf top = splat(-__builtin_inff()), check = {};
  vi index = {};

  // x: elements first to first + 15; of an incomplete vector, only the first `count` of them.
  void add(vf x, int64_t first, int64_t count = kLanes) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (count < kLanes) x = lane < static_cast<int32_t>(count) ? x : vf{};
    check += x * 0.0f;  // NaN from now on if x is not finite
    if (count < kLanes) x = lane < static_cast<int32_t>(count) ? x : splat(-__builtin_inff());
    const vi greater = x > top;
    top = greater ? x : top;
    index = greater ? lane + static_cast<int32_t>(first) : index;
  }

  // The same for all that was added here and to `result`.
  void merge_into(RowMaximum& result) const {
    for (int lane = 0; lane < kLanes; ++lane)
      if (top[lane] > result.value || (top[lane] == result.value && index[lane] < result.index))
        result = {index[lane], top[lane], result.finite};
    result.finite = result.finite && sum(check) == 0.0f;
  }
};

inline RowMaximum row_maximum(const float* row, int64_t n) {
  LaneMaxima maxima;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) maxima.add(load(row + i), i);
  if (i < n) maxima.add(load_some(row + i, n - i, 0), i, n - i);
  RowMaximum result{0, -__builtin_inff(), true};
  maxima.merge_into(result);
  return result;
}

// The index of the largest of each row of x @ weight.T + bias, and whether the row is finite, as row_maximum() finds
// them: the products themselves are not kept.
template <class T>
void product_maxima(const T* x, int64_t m, const Linear& linear, int64_t* ids, uint8_t* finite) {
  const int64_t parts = num_column_parts(linear, m);
  LaneMaxima* maxima = scratch<LaneMaxima>(Scratch::kMaxima, parts * m);
  for (int64_t i = 0; i < parts * m; ++i) maxima[i] = LaneMaxima{};
  product(x, linear.in_features, m, linear, parts, [&](int64_t part, int64_t row, int64_t panel, const vf* values) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanel + v * kLanes;
      const int64_t count = min64(kLanes, linear.out_features - column);
      if (count > 0) maxima[part * m + row].add(values[v], column, count);
    }
  });
  for (int64_t row = 0; row < m; ++row) {
    RowMaximum result{0, -__builtin_inff(), true};
    for (int64_t part = 0; part < parts; ++part) maxima[part * m + row].merge_into(result);
    ids[row] = result.index;
    finite[row] = result.finite;
  }
}

// exp((x - top) / temperature), 0 where that is below `least`. Elements i to i + 15, and 0 behind the end.
inline vf row_weights(const float* row, int64_t i, int64_t n, float top, float factor, float least) {
  const vf x = i + kLanes <= n ? load(row + i) : load_some(row + i, n - i, -__builtin_inff());
  const vf weights = exp2((x - top) * factor);
  return weights < least ? vf{} : weights;
}

// Sum of the weights of [first, last), first being a multiple of kSumChunk.
inline double chunk_sum(const float* row, int64_t first, int64_t last, int64_t n, float top, float factor,
                        float least) {
  vf total = {};
  for (int64_t i = first; i < last; i += kLanes) total += row_weights(row, i, n, top, factor, least);
  return sum(total);
}

// Sum over the row of exp((x - maximum) / temperature).
inline double exp_sum(const float* row, int64_t n, float temperature) {
  const float top = row_maximum(row, n).value, factor = kLog2E / temperature;
  double total = 0;
  for (int64_t i = 0; i < n; i += kSumChunk) total += chunk_sum(row, i, min64(n, i + kSumChunk), n, top, factor, 0);
  return total;
}

// Inverts the distribution function at `uniform`: the first index whose cumulated weight exceeds uniform * total.
// Tokens of less than min_p times the likeliest one's probability have none.
inline int64_t draw(const float* row, int64_t n, float temperature, float min_p, double uniform) {
  const RowMaximum maximum = row_maximum(row, n);
  const float top = maximum.value, factor = kLog2E / temperature;
  double total = 0;
  for (int64_t i = 0; i < n; i += kSumChunk) total += chunk_sum(row, i, min64(n, i + kSumChunk), n, top, factor, min_p);
  const double target = uniform * total;
  double before = 0;
  int64_t last = maximum.index;  // the last token with any weight, should rounding put the target behind all of them
  for (int64_t i = 0; i < n; i += kSumChunk) {
    const int64_t end = min64(n, i + kSumChunk);
    const double chunk = chunk_sum(row, i, end, n, top, factor, min_p);
    if (before + chunk > target) {
      double cumulated = before;
      for (int64_t j = i; j < end; j += kLanes) {
        const vf weights = row_weights(row, j, n, top, factor, min_p);
        for (int lane = 0; lane < kLanes; ++lane) {
          if (weights[lane] == 0) continue;
          cumulated += weights[lane];
          last = j + lane;
          if (cumulated > target) return last;
        }
      }
    }
    before += chunk;
  }
  return last;
}

// The k largest of a row, in descending order, the first of equals first: a heap of the best so far, its worst on top.
inline void top_k(const float* row, int64_t n, int64_t k, float* values, int64_t* ids) {
  const auto worse = [&](int64_t a, int64_t b) {
    return values[a] < values[b] || (values[a] == values[b] && ids[a] > ids[b]);
  };
  const auto swap = [&](int64_t a, int64_t b) {
    const float value = values[a];
    const int64_t id = ids[a];
    values[a] = values[b], ids[a] = ids[b];
    values[b] = value, ids[b] = id;
  };
  const auto sink = [&](int64_t at, int64_t size) {
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
      if (child + 1 < size && worse(child + 1, child)) ++child;
      if (!worse(child, at)) return;
      swap(child, at);
    }
  };
  for (int64_t i = 0; i < k; ++i) values[i] = row[i], ids[i] = i;
  for (int64_t i = k / 2 - 1; i >= 0; --i) sink(i, k);
  const auto offer = [&](int64_t i) {
    if (!(row[i] > values[0])) return;
    values[0] = row[i], ids[0] = i;
    sink(0, k);
  };
  int64_t i = k;
  for (; i + kLanes <= n; i += kLanes) {
    if (max_lane(load(row + i)) > values[0])
      for (int lane = 0; lane < kLanes; ++lane) offer(i + lane);
  }
  for (; i < n; ++i) offer(i);
  for (int64_t size = k - 1; size > 0; --size) {
    swap(0, size);
    sink(0, size);
  }
}
