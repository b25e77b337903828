// compress_int4 and expand_int4.

namespace hot::HOT_ISA {

inline float from_word(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

/// fp32 rounded to bf16 bits away from zero if `away`, else towards it.
inline uint16_t bf16_outward(float x, bool away) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  if ((b & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  bool inexact = (b & 0xffff) != 0;
  return static_cast<uint16_t>((b >> 16) + (away && inexact ? 1 : 0));
}

struct MinMax {
  float minimum, reciprocal;
  uint16_t scale_bits, minimum_bits;
};

/// The grid of a group with these extremes; `top` holds the bits of its largest magnitude.
inline MinMax grid_of(float low, float high, uint32_t top) {
  constexpr uint16_t nan = 0x7fc0;
  if (top >= 0x7f800000) return {0.0f, 0.0f, 0, nan};
  uint16_t minimum_bits = bf16_outward(low, low < 0);
  float minimum = from_word(static_cast<uint32_t>(minimum_bits) << 16);
  float width = high - minimum;
  if (!(width <= 0x1.fffffep127f)) return {0.0f, 0.0f, 0, nan};
  if (width < kTiny) return {minimum, 0.0f, 0, minimum_bits};
  uint16_t scale_bits = bf16_outward(width / 15.0f, true);
  return {minimum, 1.0f / from_word(static_cast<uint32_t>(scale_bits) << 16), scale_bits,
          minimum_bits};
}

struct GroupBuffer {
  alignas(64) float values[kInt4Group * kStrip];
  alignas(64) float low[kStrip], high[kStrip];
  alignas(64) uint32_t top[kStrip];
};

template <class T>
void gather_group_of_rows(const T* row, int64_t row_stride, int rows, int width, GroupBuffer& b) {
  const int ahead = rows_ahead<T>(width);
  F low[kStrip / kLanes], high[kStrip / kLanes];
  I top[kStrip / kLanes];
  const int lanes = (width + kLanes - 1) / kLanes * kLanes;
  for (int c = 0; c < lanes; c += kLanes) {
    low[c / kLanes] = high[c / kLanes] = load_up_to(row + c, width - c);
    top[c / kLanes] = set_int(0);
  }
  for (int r = 0; r < rows; ++r, row += row_stride) {
    // the next strip's first rows follow this one's last
    const T* next =
        r + ahead < rows ? row + ahead * row_stride : row + (ahead - rows) * row_stride + width;
    prefetch_rows(next, 0, 1, width);
    for (int c = 0; c < width; c += kLanes) {
      F y = load_up_to(row + c, width - c);
      low[c / kLanes] = min(low[c / kLanes], y);
      high[c / kLanes] = max(high[c / kLanes], y);
      top[c / kLanes] = max_int(top[c / kLanes], magnitude(y));
      store(b.values + r * kStrip + c, y);
    }
  }
  for (int c = 0; c < lanes; c += kLanes) {
    store(b.low + c, low[c / kLanes]);
    store(b.high + c, high[c / kLanes]);
    store_int(b.top + c, top[c / kLanes]);
  }
}

/// Packs 128 x 16 values; rows past the last hold the minimum, whose integer is 0.
inline void pack_group(const float* values, F minimum, F factor, uint8_t* packed, int64_t stride,
                       int columns, int bytes) {
  I words[16];
  auto q = [&](int r) { return nearest_product(sub(load(values + r * kStrip), minimum), factor); };
  for (int i = 0; i < 16; ++i) {
    int r = 8 * i;
    I even = pack_lanes<false>(q(r), q(r + 2), q(r + 4), q(r + 6));
    I odd = pack_lanes<false>(q(r + 1), q(r + 3), q(r + 5), q(r + 7));
    words[i] = or_int(min_unsigned_bytes(even, 15), shift_left<4>(min_unsigned_bytes(odd, 15)));
  }
  transpose(words);
  for (int c = 0; c < columns && c < kLanes; ++c) {
    store_bytes(packed + c * stride, words[c], bytes);
  }
}

void compress_int4(const Matrix& x, int64_t group, int64_t column, int width,
                   const Int4Storage& out) {
  GroupBuffer b;
  const int64_t left = x.rows - group * kInt4Group;
  const int rows = static_cast<int>(left < kInt4Group ? left : kInt4Group);
  const int bytes = (rows + kContractAlign - 1) / kContractAlign * kContractAlign / 2;
  with_type(x.type, [&](auto t) {
    auto* row = static_cast<const decltype(t)*>(x.data) + group * kInt4Group * x.cols + column;
    gather_group_of_rows(row, x.cols, rows, width, b);
  });
  alignas(64) float minimum[kStrip] = {}, factor[kStrip] = {};
  for (int c = 0; c < width; ++c) {
    MinMax grid = grid_of(b.low[c], b.high[c], b.top[c]);
    minimum[c] = grid.minimum;
    factor[c] = grid.reciprocal;
    out.scale[(column + c) * out.groups + group] = grid.scale_bits;
    out.minimum[(column + c) * out.groups + group] = grid.minimum_bits;
    if (grid.reciprocal == 0) {  // q = 0 whatever the values are, which may be inf or NaN
      minimum[c] = 0;
      for (int r = 0; r < rows; ++r) b.values[r * kStrip + c] = 0;
    }
  }
  for (int c = 0; c < width; c += kLanes) {
    F low = load(minimum + c);
    for (int r = rows; r < kInt4Group; ++r) store(b.values + r * kStrip + c, low);
    pack_group(b.values + c, low, load(factor + c),
               out.packed + (column + c) * out.bytes + group * (kInt4Group / 2), out.bytes,
               width - c, bytes);
  }
}

/// Scale, reciprocal and zero of one column's grid; NaN scale and zero if a group is not finite.
struct ColumnGrid {
  float scale, reciprocal, zero;
};

inline ColumnGrid column_grid(const uint16_t* scale, const uint16_t* minimum, int64_t groups) {
  const float nan = from_word(0x7fc00000), inf = from_word(0x7f800000);
  float low = inf, high = -inf;
  bool undefined = false;
  for (int64_t g = 0; g < groups; ++g) {
    float step = from_word(static_cast<uint32_t>(scale[g]) << 16);
    float bottom = from_word(static_cast<uint32_t>(minimum[g]) << 16);
    float top = 15.0f * step + bottom;
    undefined |= bottom != bottom || top != top;
    low = bottom < low ? bottom : low;
    high = top > high ? top : high;
  }
  if (undefined) return {nan, 0.0f, nan};
  float zero = (low + high) * 0.5f, width = high - low;
  if (width < kTiny) return {0.0f, 0.0f, zero};
  if (!(width < inf)) return {nan, 0.0f, zero};
  return {width / 254.0f, 254.0f / width, zero};
}

void expand_int4(const Int4Storage& in, int64_t begin, int64_t end, const Int8Columns& out) {
  const F levels = to_float(lane_index());
  for (int64_t column = begin; column < end; ++column) {
    const uint16_t *scale = in.scale + column * in.groups,
                   *minimum = in.minimum + column * in.groups;
    ColumnGrid grid = column_grid(scale, minimum, in.groups);
    out.scale[column] = grid.scale;
    out.zero[column] = grid.zero;
    const uint8_t* packed = in.packed + column * in.bytes;
    int8_t* q = out.q + column * in.bytes * 2;
    if (grid.reciprocal == 0) {
      clear(q, in.bytes * 2);
      continue;
    }
    for (int64_t g = 0, byte = 0; byte < in.bytes; ++g, byte += kInt4Group / 2) {
      F step = set(from_word(static_cast<uint32_t>(scale[g]) << 16));
      F low = set(from_word(static_cast<uint32_t>(minimum[g]) << 16));
      F value = sub(add(mul(levels, step), low), set(grid.zero));
      I level = nearest_to_int(mul(value, set(grid.reciprocal)));
      int8_t table[64];
      store_int(table, clamp_bytes(pack_sequence(level, level, level, level), 127));
      int64_t left = in.bytes - byte;
      expand_nibbles(packed + byte, static_cast<int>(left < 64 ? left : 64), table, q + 2 * byte);
    }
  }
}

}  // namespace hot::HOT_ISA
