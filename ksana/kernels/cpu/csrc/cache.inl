// The layout of the KV cache, made for reading: what attention loads as one vector lies together.
//
// A block holds, for each key head, its keys and then its values. Keys are [head_size / width][block_size][width]: a
// vector is sixteen keys at one step of the inner dimension (width 2 for bfloat16, else 1). Values are
// [block_size / width][head_size][width]: a vector is sixteen elements of `width` neighbouring keys, which are single
// ones if the block size is odd. The same number of bytes as in any other order.

struct CacheLayout {
  int64_t block_size, kv_heads, head_size;
  int64_t key_width, value_width;

  CacheLayout(int64_t block_size, int64_t kv_heads, int64_t head_size, int64_t width)
      : block_size(block_size),
        kv_heads(kv_heads),
        head_size(head_size),
        key_width(head_size % width == 0 ? width : 1),
        value_width(block_size % width == 0 ? width : 1) {}

  // Whether tiles of sixteen keys and vectors of sixteen elements lie together.
  bool in_tiles() const { return block_size % kLanes == 0 && head_size % kLanes == 0; }

  // Elements before the keys, and before the values, of a head in a block.
  int64_t keys(int64_t block, int64_t head) const { return (block * kv_heads + head) * 2 * block_size * head_size; }
  int64_t values(int64_t block, int64_t head) const { return keys(block, head) + block_size * head_size; }

  // Place of element i of the key, or value, at `offset` in the block.
  int64_t in_keys(int64_t offset, int64_t i) const {
    return (i / key_width * block_size + offset) * key_width + i % key_width;
  }
  int64_t in_values(int64_t offset, int64_t i) const {
    return (offset / value_width * head_size + i) * value_width + offset % value_width;
  }
};

// -- eight bit floats (Micikevicius et al. 2022): 1 sign, 4 or 5 exponent, 3 or 2 mantissa bits -----------------------

struct E4M3 {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr float largest = 448.0f;
  static constexpr int largest_code = 0x7e;  // the code of `largest`; what lies above is NaN
};
struct E5M2 {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr float largest = 57344.0f;
  static constexpr int largest_code = 0x7b;
};

// To nearest, ties to even; what is too large becomes the largest number.
template <class Format>
inline uint8_t to_float8(float x) {
  constexpr int m = Format::mantissa;
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 31 << 7);
  float a = __builtin_fabsf(x);
  if (a != a) return 0x7f;
  if (a > Format::largest) a = Format::largest;
  if (a < 1.0f / (1 << (Format::bias - 1))) {  // a subnormal number: a multiple of the smallest one
    const float steps = a * static_cast<float>(1 << (Format::bias - 1 + m));
    return static_cast<uint8_t>(sign | static_cast<int>((steps + 12582912.0f) - 12582912.0f));
  }
  __builtin_memcpy(&bits, &a, 4);
  bits += (1u << (22 - m)) - 1 + ((bits >> (23 - m)) & 1);
  return static_cast<uint8_t>(sign | ((bits >> (23 - m)) - ((127u - Format::bias) << m)));
}

template <class Format>
inline vf from_float8(const uint8_t* p) {  // sixteen of them
  typedef uint8_t bytes __attribute__((vector_size(16)));
  typedef uint16_t shorts __attribute__((vector_size(32)));
  bytes codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  const vu wide = __builtin_convertvector(__builtin_convertvector(codes, shorts), vu);
  const vu magnitude = (wide & 0x7f) << (23 - Format::mantissa);
  uint32_t power = static_cast<uint32_t>(254 - Format::bias) << 23;  // 2 ^ (127 - bias)
  float scale;
  __builtin_memcpy(&scale, &power, 4);
  const vf value = (vf)((vu)((vf)magnitude * scale) | (wide & 0x80) << 24);
  return (vi)(wide & 0x7f) > Format::largest_code ? splat(__builtin_nanf("")) : value;
}

// -- writing ----------------------------------------------------------------------------------------------------------

// Widths are those of the layout, as constants: the elements are few and the loops short.
template <int KeyWidth, int ValueWidth, class T, class Element, class Convert>
inline void write_token_by(const CacheLayout& layout, int64_t slot, const T* kv, Element* cache,
                           const Convert& convert) {
  const int64_t block = slot / layout.block_size, offset = slot % layout.block_size, d = layout.head_size;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const T* key = kv + head * d;
    const T* value = kv + (layout.kv_heads + head) * d;
    // The places that in_keys and in_values name, without their divisions.
    Element* keys = cache + layout.keys(block, head) + offset * KeyWidth;
    for (int64_t i = 0; i < d; i += KeyWidth, keys += layout.block_size * KeyWidth)
      for (int w = 0; w < KeyWidth; ++w) keys[w] = convert(key[i + w]);
    Element* values = cache + layout.values(block, head) + layout.in_values(offset, 0);
    for (int64_t i = 0; i < d; ++i) values[i * ValueWidth] = convert(value[i]);
  }
}

template <class T, class Element, class Convert>
inline void write_token_as(const CacheLayout& layout, int64_t slot, const T* kv, Element* cache,
                           const Convert& convert) {
  constexpr int width = Inner<T>::width;
  if (layout.key_width == width && layout.value_width == width)
    write_token_by<width, width>(layout, slot, kv, cache, convert);
  else if (layout.key_width == width)
    write_token_by<width, 1>(layout, slot, kv, cache, convert);
  else if (layout.value_width == width)
    write_token_by<1, width>(layout, slot, kv, cache, convert);
  else
    write_token_by<1, 1>(layout, slot, kv, cache, convert);
}

// Keys and values [2 * kv_heads, head_size] of a token to its slot, in eight bits divided by `scale`.
template <class T>
inline void write_token(const CacheLayout& layout, int32_t dtype, float scale, int64_t slot, const T* kv, void* cache) {
  uint8_t* bytes = static_cast<uint8_t*>(cache);
  if (dtype == kFloat8E4M3)
    write_token_as(layout, slot, kv, bytes, [&](T x) { return to_float8<E4M3>(to_float(x) / scale); });
  else if (dtype == kFloat8E5M2)
    write_token_as(layout, slot, kv, bytes, [&](T x) { return to_float8<E5M2>(to_float(x) / scale); });
  else
    write_token_as(layout, slot, kv, static_cast<T*>(cache), [](T x) { return x; });
}
