// quantize_shared, rescale_int4, rescale_int8: reference_shared.py on sixteen lanes.

namespace hot::HOT_ISA {

constexpr uint32_t kMagicBits = 0x4B400000;  // reference_shared._MAGIC_BITS

/// reference_shared.quantize_fixed of a lifted value.
inline I round_fixed(F value, F factor, I place) {
  I fixed = nearest_product(value, factor);
  I mixed = mul_int(xor_int(add_int(fixed, set_int(kMagicBits)), place), set_int(kMixHash));
  return shift_right_signed<8>(add_int(fixed, shift_right<24>(mixed)));
}

template <class T>
const T* unit_of(const SharedForms& s, int64_t unit) {
  return static_cast<const T*>(s.g.data) + s.first_row(unit) * s.g.cols;
}

template <class T>
inline void load_unit(const T* row, int64_t stride, int valid, int columns, F lift, F (&x)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    x[i] = i < valid ? mul(load_up_to(row + i * stride, columns), lift) : set(0.0f);
  }
}

template <class T>
void shared_absmax_of(const SharedForms& s, int64_t unit, uint32_t* absmax) {
  const int valid = s.valid_rows(unit);
  const int64_t cols = s.g.cols, stride = s.tokens * cols;
  const T* row = unit_of<T>(s, unit);
  for (int i = 0; i < kLanes; ++i) {
    I top = set_int(0);
    for (int64_t c = 0; i < valid && c < cols; c += kLanes) {
      int n = static_cast<int>(cols - c < kLanes ? cols - c : kLanes);
      F x = mul(load_up_to(row + i * stride + c, n), load(s.lift + c));
      top = max_int(top, magnitude(x));
    }
    absmax[i] = largest_lane(top);
  }
}

/// Up to sixteen columns on their way through the 64 contracted rows of one call.
struct SharedColumns {
  int64_t column;
  int width;
  F lift;
  I place;  // of the columns
};

inline SharedColumns shared_columns(const SharedForms& s, int64_t column) {
  int64_t left = s.g.cols - column;
  I index = add_int(set_int(static_cast<uint32_t>(column)), lane_index());
  return {column, static_cast<int>(left < kLanes ? left : kLanes), load(s.lift + column),
          mul_int(index, set_int(kColHash))};
}

inline I quantize_fixed(F lifted, const SharedColumns& c, float reciprocal, uint32_t row) {
  if (reciprocal == 0) return set_int(0);
  return round_fixed(lifted, set(reciprocal), xor_int(c.place, set_int(row * kRowHash)));
}

/// One row's integers, also stored where g_x reads them.
inline I quantize_row_part(const SharedForms& s, F lifted, const SharedColumns& c, float reciprocal,
                           int64_t row) {
  I q = quantize_fixed(lifted, c, reciprocal, static_cast<uint32_t>(row));
  store_low_bytes(s.row_q + row * s.padded_cols + c.column, q);
  return q;
}

/// Stores 64 contracted rows from `k` on of the columns of `c`, packed 4 x 16 bytes a vector.
inline void store_columns(const SharedForms& s, const SharedColumns& c, int64_t k,
                          I (&packed)[16]) {
  const int64_t left = s.k - k;
  const int bytes = static_cast<int>(left < kTile ? left : kTile);
  transpose(packed);
  for (int i = 0; i < c.width; ++i) {
    store_bytes(s.col_q + (c.column + i) * s.k + k, packed[i], bytes);
  }
}

constexpr int kBlocks = kStrip / kLanes;

/// The rows themselves: four rows of a strip at a time, so that whole lines are read and written.
template <class T>
void quantize_rows_too(const SharedForms& s, int64_t unit, int64_t column, int blocks,
                       const UnitReciprocals* reciprocals) {
  alignas(64) I packed[kBlocks][16];
  SharedColumns c[kBlocks];
  for (int b = 0; b < blocks; ++b) c[b] = shared_columns(s, column + b * kLanes);
  for (int quad = 0; quad < kTile / 4; ++quad) {
    const UnitReciprocals& r = reciprocals[quad / 4];
    I q[kBlocks][4];
    for (int j = 0; j < 4; ++j) {
      const int64_t row = unit * kLanes + 4 * quad + j;
      const T* source = static_cast<const T*>(s.g.data) + row * s.g.cols + column;
      for (int b = 0; b < blocks; ++b) {
        q[b][j] = set_int(0);
        if (row >= s.g.rows) continue;
        F lifted = mul(load_up_to(source + b * kLanes, c[b].width), c[b].lift);
        q[b][j] = quantize_row_part(s, lifted, c[b], r.row[4 * quad % kLanes + j], row);
      }
    }
    for (int b = 0; b < blocks; ++b) {
      packed[b][quad] = pack_lanes<true>(q[b][0], q[b][1], q[b][2], q[b][3]);
    }
  }
  for (int b = 0; b < blocks; ++b) store_columns(s, c[b], unit * kLanes, packed[b]);
}

/// Two vectors of 4 x 16 bytes of what HLA keeps of one unit; stores the unit's rows as well.
template <class T>
inline void pack_kept(const SharedForms& s, int64_t unit, const SharedColumns& c,
                      const UnitReciprocals& r, I* packed) {
  constexpr uint32_t kept = 0x5d0d;  // the first 8 of LP_L1, see kLowPass in quantize_columns.cpp
  const int valid = s.valid_rows(unit);
  const int64_t first = s.first_row(unit), stride = s.tokens * s.g.cols;
  F x[16];
  load_unit(unit_of<T>(s, unit) + c.column, stride, valid, c.width, c.lift, x);
  for (int i = 0; i < valid; ++i) quantize_row_part(s, x[i], c, r.row[i], first + i * s.tokens);
  hadamard_vectors(x);
  I q[8];
  uint32_t k = 0;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (!(kept >> i & 1)) continue;
    uint32_t row = static_cast<uint32_t>(unit) * 8 + k;
    q[k++] = quantize_fixed(mul(x[i], set(0.25f)), c, r.kept, row);
  }
  packed[0] = pack_lanes<true>(q[0], q[1], q[2], q[3]);
  packed[1] = pack_lanes<true>(q[4], q[5], q[6], q[7]);
}

template <class T>
void shared_quantize_of(const SharedForms& s, int64_t unit, const UnitReciprocals* reciprocals) {
  for (int64_t column = 0; column < s.g.cols; column += kStrip) {
    int64_t left = s.g.cols - column;
    int blocks = static_cast<int>(left < kStrip ? (left + kLanes - 1) / kLanes : kBlocks);
    if (s.unit_rows == kLanes) {
      quantize_rows_too<T>(s, unit, column, blocks, reciprocals);
      continue;
    }
    for (int b = 0; b < blocks; ++b) {
      SharedColumns c = shared_columns(s, column + b * kLanes);
      I packed[16];
      for (int u = 0; u < 8; ++u) pack_kept<T>(s, unit + u, c, reciprocals[u], packed + 2 * u);
      store_columns(s, c, unit * s.unit_rows, packed);
    }
  }
}

void shared_absmax(const SharedForms& s, int64_t unit, uint32_t* absmax) {
  with_type(s.g.type, [&](auto t) { shared_absmax_of<decltype(t)>(s, unit, absmax); });
}

void shared_quantize(const SharedForms& s, int64_t unit, const UnitReciprocals* reciprocals) {
  with_type(s.g.type, [&](auto t) { shared_quantize_of<decltype(t)>(s, unit, reciprocals); });
}

template <class T>
void sum_rows_of(const Matrix& x, int64_t begin, int64_t end, float* sums) {
  for (int64_t c = 0; c < x.cols; c += kLanes) {
    int n = static_cast<int>(x.cols - c < kLanes ? x.cols - c : kLanes);
    F sum = set(0.0f);
    for (int64_t r = begin; r < end; ++r)
      sum = add(sum, load_up_to(static_cast<const T*>(x.data) + r * x.cols + c, n));
    float lanes[kLanes];
    store(lanes, sum);
    std::memcpy(sums + c, lanes, n * sizeof(float));
  }
}

void sum_rows(const Matrix& x, int64_t begin, int64_t end, float* sums) {
  with_type(x.type, [&](auto t) { sum_rows_of<decltype(t)>(x, begin, end, sums); });
}

template <class T>
void quantize_scaled_rows_of(const Matrix& x, const float* factor, int64_t begin, int64_t end,
                             float* buffer, const RowOutput& out) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(x.data) + r * x.cols;
    I top = set_int(0);
    for (int64_t c = 0; c < x.cols; c += kLanes) {
      int n = static_cast<int>(x.cols - c < kLanes ? x.cols - c : kLanes);
      F y = mul(load_up_to(row + c, n), load_up_to(factor + c, n));
      top = max_int(top, magnitude(y));
      store(buffer + c, y);
    }
    Scale scale = scale_of(largest_lane(top), 127);
    out.scale[r] = scale.scale;
    int8_t* q = out.q + r * out.padded_cols;
    if (scale.reciprocal == 0) {
      clear(q, out.padded_cols);
      continue;
    }
    quantize_row<false>(buffer, out.padded_cols, scale.reciprocal, 127, static_cast<uint32_t>(r),
                        q);
  }
}

void quantize_scaled_rows(const Matrix& x, const float* factor, int64_t begin, int64_t end,
                          float* buffer, const RowOutput& out) {
  with_type(x.type, [&](auto t) {
    quantize_scaled_rows_of<decltype(t)>(x, factor, begin, end, buffer, out);
  });
}

inline float from_bf16(uint16_t b) { return from_word(static_cast<uint32_t>(b) << 16); }

/// Bits of the bound of one column, NaN above all.
inline uint32_t column_bound(const Rescaling& r, int64_t column) {
  uint32_t most = 0;
  for (int64_t t = 0; t < r.tiles; ++t) {
    float step = from_bf16(r.scale[column * r.tiles + t]);
    float magnitudes[2] = {step * 127.0f, 0.0f};
    if (r.minimum) {
      float low = from_bf16(r.minimum[column * r.tiles + t]);
      magnitudes[0] = low;
      magnitudes[1] = 15.0f * step + low;
    }
    for (float m : magnitudes) {
      float bound = m * r.tile_peak[t];
      uint32_t b;
      std::memcpy(&b, &bound, 4);
      b &= 0x7fffffff;
      most = b > most ? b : most;
    }
  }
  return most;
}

/// 64 places of one column from `values`, of which `n` are in its tile.
inline void rescale_places(const int8_t* values, int n, float slope, float start, const float* fold,
                           int8_t* q) {
  I part[4];
  for (int i = 0; i < 4; ++i) {
    if (16 * i >= n) {
      part[i] = set_int(0);
      continue;
    }
    F x = add(mul(to_float(load_bytes(values + 16 * i)), set(slope)), set(start));
    part[i] = nearest_product(x, load(fold + 16 * i));
  }
  I packed = pack_sequence(part[0], part[1], part[2], part[3]);
  store_bytes(q, clamp_bytes(packed, 127), n);
}

void rescale(const Rescaling& r, int64_t begin, int64_t end) {
  alignas(64) int8_t levels[64], nibbles[2 * kInt4Group];
  for (int i = 0; i < 64; ++i) levels[i] = static_cast<int8_t>(i % 16);
  for (int64_t column = begin; column < end; ++column) {
    Scale grid = scale_of(column_bound(r, column), 127);
    r.column[column] = grid.scale;
    int8_t* q = r.q + column * r.k;
    if (grid.reciprocal == 0) {
      clear(q, r.k);
      continue;
    }
    for (int64_t t = 0, k = 0; k < r.k; ++t, k += r.tile) {
      int n = static_cast<int>(r.k - k < r.tile ? r.k - k : r.tile);
      float slope = from_bf16(r.scale[column * r.tiles + t]) * grid.reciprocal, start = 0.0f;
      const int8_t* values = reinterpret_cast<const int8_t*>(r.stored) + column * r.k + k;
      if (r.minimum) {
        start = from_bf16(r.minimum[column * r.tiles + t]) * grid.reciprocal;
        expand_nibbles(r.stored + (column * r.k + k) / 2, n / 2, levels, nibbles);
        values = nibbles;
      }
      for (int i = 0; i < n; i += 64) {
        rescale_places(values + i, n - i < 64 ? n - i : 64, slope, start, r.fold + k + i,
                       q + k + i);
      }
    }
  }
}

}  // namespace hot::HOT_ISA
