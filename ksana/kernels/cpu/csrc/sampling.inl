// What sampling needs of a row of logits. Every row is summed up in one fixed order.

constexpr int64_t kSumChunk = 1024;

struct RowMaximum {
  int64_t index;  // the first of equals
  float value;
  bool finite;  // all of the row
};

inline RowMaximum row_maximum(const float* row, int64_t n) {
  alignas(64) float best[kLanes];
  alignas(64) int32_t where[kLanes];
  vf top = splat(-__builtin_inff()), check = {};
  vi index = {}, at = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes, at += kLanes) {
    const vf x = load(row + i);
    const vi greater = x > top;
    top = greater ? x : top;
    index = greater ? at : index;
    check += x * 0.0f;  // NaN from then on if x is not finite
  }
  store(best, top);
  __builtin_memcpy(where, &index, sizeof where);
  RowMaximum result{0, -__builtin_inff(), true};
  for (int lane = 0; lane < (n < kLanes ? 0 : kLanes); ++lane)
    if (best[lane] > result.value || (best[lane] == result.value && where[lane] < result.index))
      result = {where[lane], best[lane], true};
  float rest = sum(check);
  for (; i < n; ++i) {
    if (row[i] > result.value) result = {i, row[i], true};
    rest += row[i] * 0.0f;
  }
  result.finite = rest == 0.0f;
  return result;
}

// exp((x - top) / temperature), 0 where that is below `least`. Elements i to i + 15, and 0 behind the end.
inline vf row_weights(const float* row, int64_t i, int64_t n, float top, float factor, float least) {
  vf x;
  if (i + kLanes <= n) {
    x = load(row + i);
  } else {
    alignas(64) float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < n ? row[i + lane] : -__builtin_inff();
    x = load(rest);
  }
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
