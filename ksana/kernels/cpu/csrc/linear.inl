// Projections: y = x @ weight.T + bias.
//
// A weight is packed in panels of 32 columns (rows of the weight). Within a panel, for every step over the inner
// dimension, the columns lie side by side. One tile of the product is up to kRows rows by one panel, held in registers
// while the inner dimension goes by from first to last: the order in which an element is summed up does not depend on
// how many rows there are, nor on which of them a tile or a thread gets.
//
// int8 and int4 weights are integers with a scale, and for int4 a minimum, for every group of neighbours in a row:
// w = scale * q + minimum. A group's integers are multiplied exactly, as bfloat16 or float32, and its sum is scaled
// once.

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;
#if defined(KSANA_AVX512)
constexpr int kRows = 12;
constexpr int kRowsOfMany = 10;  // in one of several tiles: the addresses of more rows would not all fit registers
#elif defined(KSANA_AVX2)
constexpr int kRows = 3;  // half as wide registers, and half as many
constexpr int kRowsOfMany = kRows;
#else
constexpr int kRows = 2;
constexpr int kRowsOfMany = kRows;
#endif
constexpr int64_t kRowBlock = 192;  // rows that a task multiplies with one panel: they stay in the second-level cache
constexpr int64_t kRowsOfThread = 48;  // that are worth reading all of the weight for
constexpr int kPrefetch = 1024;     // bytes ahead of the weights in use
constexpr int kTilesToFetchBeside = 3;  // with fewer, memory is busy with the weights

inline int64_t num_panels(const Linear& linear) {
  return linear.interleaved ? cdiv(linear.out_features / 2, kLanes) : cdiv(linear.out_features, kPanel);
}

// The row of the weight that is column `c` of a panel; -1 if it is only there to fill the panel.
inline int64_t weight_row(const Linear& linear, int64_t panel, int c) {
  if (!linear.interleaved) {
    const int64_t row = panel * kPanel + c;
    return row < linear.out_features ? row : -1;
  }
  const int64_t half = linear.out_features / 2, row = panel * kLanes + c % kLanes;
  return row < half ? row + (c < kLanes ? 0 : half) : -1;
}

template <class T>
inline int64_t padded(int64_t in_features) {
  return cdiv(in_features, Inner<T>::width) * Inner<T>::width;
}

// -- packing ----------------------------------------------------------------------------------------------------------

template <class T>
void pack(const Linear& linear, const T* weight, T* packed) {
  constexpr int width = Inner<T>::width;
  const int64_t k = linear.in_features, k_padded = padded<T>(k);
  ThreadPool::instance().run(num_panels(linear), [&](int64_t panel) {
    T* out = packed + panel * kPanel * k_padded;
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = weight_row(linear, panel, c);
      for (int64_t i = 0; i < k_padded; ++i)
        out[(i / width * kPanel + c) * width + i % width] = row >= 0 && i < k ? weight[row * k + i] : from_float<T>(0);
    }
  });
}

// A group of a quantised panel: 32 scales, for int4 32 minima, and the integers.
// Those are in the order of a plain panel. int8: a byte each. int4: 128 of them in 32 words of 16 bits, the first 32 in
// the lowest nibbles, the next 32 in the next.
template <class Quantised>
inline int64_t group_bytes(int64_t group_size) {
  return kPanel * 4 * Quantised::num_constants + kPanel * group_size * Quantised::bits / 8;
}

// Each byte is a sign and a magnitude.
struct Int8 {
  static constexpr int bits = 8, num_constants = 1;
  // Of 64, those of the second half lie between those of the first, eight by eight: decode() unzips them.
  static int64_t place(int64_t e) { return e / 64 * 64 + e % 32 / 8 * 16 + e % 64 / 32 * 8 + e % 8; }
  static void put(uint8_t* data, int64_t e, uint8_t code) {
    data[place(e)] = static_cast<uint8_t>(code < 128 ? code : 128 | (256 - code));
  }
  static vf get(const uint8_t* data, int64_t e) {  // elements e to e + 15
    typedef int8_t bytes __attribute__((vector_size(16)));
    bytes codes;
    __builtin_memcpy(&codes, data + place(e), 8);
    __builtin_memcpy(reinterpret_cast<char*>(&codes) + 8, data + place(e + 8), 8);
    const bytes sign = codes < 0;
    codes = ((codes & 127) ^ sign) - sign;
    typedef int16_t shorts __attribute__((vector_size(32)));  // in steps: compilers know these conversions
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(codes, shorts), vi), vf);
  }
};

struct Int4 {
  static constexpr int bits = 4, num_constants = 2;
  static void put(uint8_t* data, int64_t e, uint8_t code) {
    uint8_t& byte = data[e / 128 * 64 + e % 32 * 2 + e % 128 / 64];
    byte = static_cast<uint8_t>(byte | code << (e % 64 / 32 * 4));
  }
  static vf get(const uint8_t* data, int64_t e) {
    typedef uint16_t words __attribute__((vector_size(32)));
    words codes;
    __builtin_memcpy(&codes, data + e / 128 * 64 + e % 32 * 2, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector((codes >> static_cast<uint16_t>(e % 128 / 32 * 4)) & 15, vi),
                                   vf);
  }
};

template <class T, class Quantised>
void pack_codes(const Linear& linear, const uint8_t* codes, const float* scales, const float* minima, uint8_t* packed) {
  const int64_t k = linear.in_features, size = linear.group_size, groups = cdiv(k, size);
  const int64_t bytes = group_bytes<Quantised>(size);
  constexpr int width = Inner<T>::width;
  ThreadPool::instance().run(num_panels(linear), [&](int64_t panel) {
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* out = packed + (panel * groups + group) * bytes;
      float* constants = reinterpret_cast<float*>(out);
      uint8_t* data = out + kPanel * 4 * Quantised::num_constants;
      __builtin_memset(out, 0, bytes);
      for (int c = 0; c < kPanel; ++c) {
        const int64_t row = weight_row(linear, panel, c);
        if (row < 0) continue;
        constants[c] = scales[row * groups + group];
        if (Quantised::num_constants == 2) constants[kPanel + c] = minima[row * groups + group];
        for (int64_t i = 0; i < min64(size, k - group * size); ++i)
          Quantised::put(data, (i / width * kPanel + c) * width + i % width, codes[row * k + group * size + i]);
      }
    }
  });
}

// -- decoding of integers into the form that a plain panel has --------------------------------------------------------

#ifdef KSANA_BF16
// 0 to 127 as bfloat16, by the bytes of it.
struct Magnitudes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr Magnitudes() {
    for (int i = 1; i < 128; ++i) {
      int exponent = 0;
      while (i >> (exponent + 1) != 0) ++exponent;
      const int bits = (127 + exponent) << 7 | (i << (7 - exponent) & 127);
      low[i] = static_cast<uint8_t>(bits & 255);
      high[i] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr Magnitudes kMagnitudes;

// Elements e to e + 31 of a group's integers; e is a multiple of 32.
inline vf decode(Int8, const uint8_t* data, int64_t e) {
  const __m512i codes = _mm512_loadu_si512(data + e / 64 * 64);
  const auto found = [codes](const uint8_t (&table)[128]) __attribute__((always_inline)) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  };
  // The instruction looks at seven bits of each byte.
  const __m512i low = found(kMagnitudes.low), magnitude = found(kMagnitudes.high);
  const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, _mm512_set1_epi8(-128), 0xf8);  // m | (c & sign)
  return (vf)(e % 64 == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
}
inline vf decode(Int4, const uint8_t* data, int64_t e) {
  // 0 to 15 as bfloat16, twice: the instruction looks at five bits of each word.
  alignas(64) static const uint16_t table[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,  //
                                                 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  const __m512i words = _mm512_loadu_si512(data + e / 128 * 64);
  const __m512i codes = _mm512_srli_epi16(words, static_cast<unsigned>(e % 128 / 32 * 4));
  return (vf)_mm512_permutexvar_epi16(codes, _mm512_load_si512(table));
}
#endif

// The integers of a group, as T.
template <class T, class Quantised>
inline void unpack_group(const uint8_t* data, int64_t size, T* out) {
#ifdef KSANA_BF16
  if constexpr (std::is_same_v<T, bf16>) {
    for (int64_t e = 0; e < size * kPanel; e += 2 * kLanes) {
      const vf pairs = decode(Quantised{}, data, e);
      __builtin_memcpy(out + e, &pairs, sizeof pairs);
    }
    return;
  }
#endif
  for (int64_t e = 0; e < size * kPanel; e += kLanes) store(out + e, Quantised::get(data, e));
}

// -- rows -------------------------------------------------------------------------------------------------------------

// Row `row` of the weight, as T: [in_features].
template <class T>
void unpack_row(const Linear& linear, int64_t row, T* out) {
  constexpr int width = Inner<T>::width;
  const int64_t k = linear.in_features;
  const T* panel = static_cast<const T*>(linear.packed) + row / kPanel * kPanel * padded<T>(k);
  for (int64_t i = 0; i < k; ++i) out[i] = panel[(i / width * kPanel + row % kPanel) * width + i % width];
}

// -- tiles ------------------------------------------------------------------------------------------------------------

// acc[r][v] += x[r] * weights, over `steps` steps, with weights(step, v) from anywhere.
template <class T, int Rows, class Weights>
inline __attribute__((always_inline)) void accumulate(vf (&acc)[Rows][kPanelVectors], const T* x, int64_t ldx,
                                                      int64_t steps, const Weights& weights) {
  for (int64_t s = 0; s < steps; ++s) {
    vf w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) w[v] = weights(s, v);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const vf b = Inner<T>::broadcast(x + r * ldx + s * Inner<T>::width);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = Inner<T>::dot(acc[r][v], w[v], b);
    }
  }
}

template <int Rows>
inline __attribute__((always_inline)) void put(const vf (&acc)[Rows][kPanelVectors], float (*out)[kPanel]) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) store(out[r] + v * kLanes, acc[r][v]);
}

// A tile of a product with a plain panel. beside: what else is fetched if `Fetches`, no more lines than steps.
template <class T, int Rows, bool Fetches>
void plain_tile(const T* x, int64_t ldx, const T* panel, int64_t k, const Ahead& ahead, const Lines& beside,
                float (*out)[kPanel]) {
  constexpr int width = Inner<T>::width;
  vf acc[Rows][kPanelVectors] = {};
  const auto go = [&](int64_t from, int64_t to, const char* lines) __attribute__((always_inline)) {
    const T* w = panel + from * kPanel * width;
    const Ahead here{ahead.from + from * ahead.pace, ahead.pace};
    accumulate<T, Rows>(acc, x + from * width, ldx, to - from, [=](int64_t s, int v) __attribute__((always_inline)) {
      const int64_t column = v * kLanes * width;
      __builtin_prefetch(here.from + s * here.pace + column * sizeof(T));
      if (lines != nullptr && v == 0) fetch(lines + s * kLine);
      return Inner<T>::weights(w + s * kPanel * width + column);
    });
  };
  if (Fetches) go(0, beside.count, beside.from);
  go(Fetches ? beside.count : 0, k / width, nullptr);
  if (k % width != 0) {  // the last of an odd number of features goes with a zero
    T last[Rows * width] = {};
    for (int r = 0; r < Rows; ++r) last[r * width] = x[r * ldx + k - 1];
    const T* w = panel + k / width * kPanel * width;
    accumulate<T, Rows>(acc, last, width, 1, [w](int64_t, int v) __attribute__((always_inline)) {
      return Inner<T>::weights(w + v * kLanes * width);
    });
  }
  put<Rows>(acc, out);
}

// A tile of a product with a quantised panel.
//
// sums: of each row of x by group, [Rows, groups]; weights(group, step, v): integers as T.
template <class T, class Quantised, int Rows, class Weights>
inline __attribute__((always_inline)) void grouped_tile(const T* x, int64_t ldx, const uint8_t* panel,
                                                        const Linear& linear, const float* sums, const Weights& weights,
                                                        float (*out)[kPanel]) {
  constexpr int width = Inner<T>::width;
  const int64_t k = linear.in_features, size = linear.group_size, groups = cdiv(k, size);
  const int64_t bytes = group_bytes<Quantised>(size);
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kPanelVectors; ++v) store(out[r] + v * kLanes, vf{});
  for (int64_t group = 0; group < groups; ++group) {
    const float* constants = reinterpret_cast<const float*>(panel + group * bytes);
    vf acc[Rows][kPanelVectors] = {};
    const int64_t steps = min64(size, k - group * size) / width;
    accumulate<T, Rows>(acc, x + group * size, ldx, steps,
                        [&](int64_t s, int v) __attribute__((always_inline)) { return weights(group, s, v); });
    // What is added is the same for each row, so the row's sums of the groups before do not matter to its order.
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf scale = load(constants + v * kLanes);
      const vf minimum = Quantised::num_constants == 2 ? load(constants + kPanel + v * kLanes) : vf{};
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        vf total = load(out[r] + v * kLanes) + acc[r][v] * scale;
        if (Quantised::num_constants == 2) total += sums[r * groups + group] * minimum;
        store(out[r] + v * kLanes, total);
      }
    }
  }
}

// With integers that were unpacked before.
template <class T, class Quantised, int Rows>
void unpacked_tile(const T* x, int64_t ldx, const uint8_t* panel, const T* integers, const Linear& linear,
                   const float* sums, float (*out)[kPanel]) {
  constexpr int width = Inner<T>::width;
  grouped_tile<T, Quantised, Rows>(
      x, ldx, panel, linear, sums,
      [&](int64_t group, int64_t s, int v) __attribute__((always_inline)) {
        return Inner<T>::weights(integers + ((group * linear.group_size / width + s) * kPanel + v * kLanes) * width);
      },
      out);
}

#ifdef KSANA_BF16
// With integers that are decoded on their way into the registers.
template <class Quantised, int Rows>
void decoding_tile(const bf16* x, int64_t ldx, const uint8_t* panel, const Linear& linear, const float* sums,
                   float (*out)[kPanel]) {
  const int64_t bytes = group_bytes<Quantised>(linear.group_size);
  grouped_tile<bf16, Quantised, Rows>(
      x, ldx, panel, linear, sums,
      [&](int64_t group, int64_t s, int v) __attribute__((always_inline)) {
        const uint8_t* data = panel + group * bytes + kPanel * 4 * Quantised::num_constants;
        if (v == 0) __builtin_prefetch(data + s * kPanel * Quantised::bits / 4 + kPrefetch);
        return decode(Quantised{}, data, (s * kPanel + v * kLanes) * 2);
      },
      out);
}
#endif

// Calls body with the number of rows as a constant.
template <int Rows = kRows, class Body>
inline void with_rows(int rows, const Body& body) {
  if (rows == Rows) return body(std::integral_constant<int, Rows>{});
  if constexpr (Rows > 1) with_rows<Rows - 1>(rows, body);
}

// -- products ---------------------------------------------------------------------------------------------------------

template <class T>
inline void tiles_of_panel(const T* x, int64_t ldx, int64_t rows, int64_t panel, const Linear& linear,
                           const float* sums, CachedKeys& beside, float (*out)[kPanel]) {
  const int64_t num_tiles = rows <= kRows ? 1 : cdiv(rows, kRowsOfMany), k = linear.in_features;
  const auto each_tile = [&](const auto& body) {
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t first = rows * i / num_tiles;
      with_rows(static_cast<int>(rows * (i + 1) / num_tiles - first), [&](auto n) { body(n, x + first * ldx, first); });
    }
  };
  if (linear.format == kPlain) {
    const T* weights = static_cast<const T*>(linear.packed) + panel * kPanel * padded<T>(k);
    // Of several tiles, only the first one would wait for memory: all of them together fetch the next panel, so that
    // memory is at work all the time. A single one runs ahead of itself.
    const int64_t bytes = kPanel * padded<T>(k) * sizeof(T), step = kPanel * Inner<T>::width * sizeof(T);
    Ahead ahead{reinterpret_cast<const char*>(weights) + (num_tiles == 1 ? kPrefetch : bytes), cdiv(step, num_tiles)};
    each_tile([&](auto n, const T* from, int64_t first) {
      const Lines lines = num_tiles < kTilesToFetchBeside ? Lines{} : beside.next(k / Inner<T>::width);
      if (lines.count == 0)
        plain_tile<T, n.value, false>(from, ldx, weights, k, ahead, lines, out + first);
      else
        plain_tile<T, n.value, true>(from, ldx, weights, k, ahead, lines, out + first);
      ahead.from += bytes / num_tiles;
    });
    return;
  }
  const auto quantised = [&](auto kind) {
    using Quantised = decltype(kind);
    const int64_t size = linear.group_size, groups = cdiv(k, size), bytes = group_bytes<Quantised>(size);
    const int64_t sums_of_row = sums == nullptr ? 0 : groups;
    const uint8_t* weights = static_cast<const uint8_t*>(linear.packed) + panel * groups * bytes;
#ifdef KSANA_BF16
    if constexpr (std::is_same_v<T, bf16>) {
      if (num_tiles == 1) {
        each_tile([&](auto n, const T* from, int64_t first) {
          decoding_tile<Quantised, n.value>(from, ldx, weights, linear, sums + first * sums_of_row, out + first);
        });
        return;
      }
    }
#endif
    T* integers = scratch<T>(Scratch::kUnpacked, groups * size * kPanel);
    for (int64_t group = 0; group < groups; ++group)
      unpack_group<T, Quantised>(weights + group * bytes + kPanel * 4 * Quantised::num_constants, size,
                                 integers + group * size * kPanel);
    each_tile([&](auto n, const T* from, int64_t first) {
      unpacked_tile<T, Quantised, n.value>(from, ldx, weights, integers, linear, sums + first * sums_of_row,
                                           out + first);
    });
  };
  if (linear.format == kInt8)
    quantised(Int8{});
  else
    quantised(Int4{});
}

// Sums of x by row and group, [m, groups], which minima are multiplied with.
template <class T>
inline const float* group_sums(const T* x, int64_t ldx, int64_t m, const Linear& linear) {
  if (linear.format != kInt4) return nullptr;
  const int64_t k = linear.in_features, size = linear.group_size, groups = cdiv(k, size);
  float* sums = scratch<float>(Scratch::kRowSums, m * groups);
  const int64_t rows = 16;
  ThreadPool::instance().run(cdiv(m, rows), [&](int64_t task) {
    for (int64_t row = task * rows; row < min64(m, (task + 1) * rows); ++row)
      for (int64_t group = 0; group < groups; ++group) {
        const T* from = x + row * ldx + group * size;
        const int64_t count = min64(size, k - group * size);
        vf total = {};
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) total += load(from + i);
        float rest = 0;
        for (; i < count; ++i) rest += to_float(from[i]);
        sums[row * groups + group] = sum(total) + rest;
      }
  });
  return sums;
}

// Into how many parts a product of m rows is best cut by its columns. Of many rows, a thread takes some with all
// panels: what it reads was mostly written by itself. Of few, it takes all with some panels, which it reads as one long
// stream: memory is fastest so.
inline int64_t num_column_parts(const Linear& linear, int64_t m) {
  const int64_t threads = ThreadPool::instance().size();
  return m >= threads * kRowsOfThread ? 1 : min64(num_panels(linear), threads);
}

// x [m, in_features] times the weight, its columns in `parts`; finish(part, row, panel, values) receives every row of
// every panel, 32 floats with the bias in them. Calls for the same row and part come one after the other. next: what is
// read afterwards, and may be fetched meanwhile; only where there are few rows, so that it is still there then.
template <class T, class Finish>
void product(const T* x, int64_t ldx, int64_t m, const Linear& linear, int64_t parts, const Finish& finish,
             const CachedKeys& next = {}) {
  const int64_t panels = num_panels(linear);
  const float* sums = group_sums(x, ldx, m, linear);
  const int64_t sums_of_row = sums == nullptr ? 0 : cdiv(linear.in_features, linear.group_size);
  const int64_t threads = parts == 1 ? ThreadPool::instance().size() : 1;
  const int64_t row_blocks = min64(m, threads * cdiv(m, threads * kRowBlock));
  ThreadPool::instance().run(row_blocks * parts, [&](int64_t task) {
    const int64_t block = task % row_blocks, part = task / row_blocks;
    const int64_t first = m * block / row_blocks, rows = m * (block + 1) / row_blocks - first;
    CachedKeys beside = parts == 1 ? CachedKeys{} : next.part(part, parts);
    for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; ++panel) {
      alignas(64) float out[kRowBlock][kPanel];
      tiles_of_panel(x + first * ldx, ldx, rows, panel, linear, sums + first * sums_of_row, beside, out);
      for (int64_t r = 0; r < rows; ++r) {
        vf values[kPanelVectors];
        for (int v = 0; v < kPanelVectors; ++v) {
          values[v] = load(out[r] + v * kLanes);
          if (linear.bias) values[v] += load(linear.bias + panel * kPanel + v * kLanes);
        }
        finish(part, first + r, panel, values);
      }
    }
  });
}

// out [m, out_features] = x @ weight.T + bias
template <class T, class Out>
void linear_into(const T* x, int64_t ldx, int64_t m, const Linear& linear, Out* out) {
  const int64_t n = linear.out_features;
  product(x, ldx, m, linear, num_column_parts(linear, m), [&](int64_t, int64_t row, int64_t panel, const vf* values) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanel + v * kLanes;
      if (v == 0) __builtin_prefetch(out + row * n + column + kPanel, 1);  // for the next panel
      if (column + kLanes <= n)
        store(out + row * n + column, values[v]);
      else
        store_some(out + row * n + column, values[v], static_cast<int>(max64(0, n - column)));
    }
  });
}

// hidden [m, out_features] += x @ weight.T + bias
template <class T>
void linear_add(const T* x, int64_t ldx, int64_t m, const Linear& linear, T* hidden) {
  const int64_t n = linear.out_features;
  product(x, ldx, m, linear, num_column_parts(linear, m), [&](int64_t, int64_t row, int64_t panel, const vf* values) {
    for (int v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanel + v * kLanes;
      T* at = hidden + row * n + column;
      if (v == 0) __builtin_prefetch(at + kPanel, 1);  // for the next panel, whose products take a while
      if (column + kLanes <= n)
        store(at, load(at) + values[v]);
      else
        for (int64_t i = 0; i < n - column; ++i) at[i] = from_float<T>(to_float(at[i]) + values[v][i]);
    }
  });
}

// out [m, out_features / 2] = activate(first half) * second half of x @ weight.T + bias; the weight must be interleaved
template <class T, class Activate>
void linear_gated(const T* x, int64_t ldx, int64_t m, const Linear& linear, const Activate& activate,
                  const CachedKeys& next, T* out) {
  const int64_t n = linear.out_features / 2;
  const auto finish = [&](int64_t, int64_t row, int64_t panel, const vf* values) {
    const vf activated = activate(values[0]) * values[1];
    const int64_t column = panel * kLanes;
    if (column + kLanes <= n)
      store(out + row * n + column, activated);
    else
      store_some(out + row * n + column, activated, static_cast<int>(n - column));
  };
  product(x, ldx, m, linear, num_column_parts(linear, m), finish, next);
}
