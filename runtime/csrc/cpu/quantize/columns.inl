// quantize_columns: HLA over groups of 16 rows, then quantisation written transposed.
//
// A task gathers a strip of columns into a compact buffer (strided rows of a large matrix fall into
// few cache sets), then reads the buffer in tiles of 64 x 16 so that every column receives whole
// cache lines.

namespace hot::HOT_ISA {

template <class T>
inline F load_up_to(const T* p, int n) {
  return n >= kLanes ? load(p) : load_n(p, n);
}

/// Butterflies at distance 1, 2, 4, 8 across sixteen vectors.
inline void hadamard_vectors(F (&x)[16]) {
#pragma GCC unroll 4
  for (int distance = 1; distance < 16; distance *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & distance) continue;
      F low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
  }
}

/// Stores the kept coefficients of one group of 16 rows of 16 columns; returns the raised absmax.
template <class T>
inline I gather_group(const T* first_row, int64_t row_stride, int valid_rows, int columns,
                      uint32_t kept, float* out, int out_stride, I top) {
  F x[16];
#pragma GCC unroll 16
  for (int s = 0; s < 16; ++s) {
    x[s] = s < valid_rows ? load_up_to(first_row + s * row_stride, columns) : set(0.0f);
  }
  hadamard_vectors(x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (!(kept >> i & 1)) continue;
    F y = x[i] * 0.25f;
    top = max_int(top, magnitude(y));
    store(out, y);
    out += out_stride;
  }
  return top;
}

template <class T>
inline void prefetch_rows(const T* row, int64_t row_stride, int rows, int columns) {
  constexpr int per_line = 64 / sizeof(T);
  for (int s = 0; s < rows; ++s) {
    for (int c = 0; c < columns; c += per_line) {
      __builtin_prefetch(row + s * row_stride + c, 0, 3);
    }
  }
}

template <class T>
void gather_transformed(const Matrix& x, const Grouping& g, const ColumnTask& task, float* values,
                        uint32_t* absmax) {
  const T* base = static_cast<const T*>(x.data) + task.column;
  const int64_t stride = g.tokens * x.cols;
  const int lanes = lanes_of(task);
  auto group_row = [&](int64_t unit) {
    int64_t group = unit / g.tokens, token = unit - group * g.tokens;
    return base + (group * kLanes * g.tokens + token) * x.cols;
  };
  auto valid = [&](int64_t unit) {
    int64_t left = g.samples - unit / g.tokens * kLanes;
    return static_cast<int>(left < kLanes ? left : kLanes);
  };
  for (int64_t u = 0; u < task.units; ++u) {
    int64_t unit = task.unit + u;
    if (u + 1 < task.units) {
      prefetch_rows(group_row(unit + 1), stride, valid(unit + 1), task.width);
    }
    for (int c = 0; c < task.width; c += kLanes) {
      I top = gather_group(group_row(unit) + c, stride, valid(unit), task.width - c, g.kept,
                           values + u * g.rank * lanes + c, lanes, load_int(absmax + c));
      store_int(absmax + c, top);
    }
  }
}

/// Rows to prefetch ahead so that about 64 cache lines are under way.
template <class T>
inline int rows_ahead(int columns) {
  constexpr int per_line = 64 / sizeof(T);
  return 64 / ((columns + per_line - 1) / per_line);
}

template <class T>
void gather_plain(const Matrix& x, const ColumnTask& task, float* values, uint32_t* absmax) {
  const T* row = static_cast<const T*>(x.data) + task.unit * x.cols + task.column;
  const int lanes = lanes_of(task);
  const int64_t ahead = rows_ahead<T>(task.width);
  I top[kStrip / kLanes];
  for (int c = 0; c < lanes; c += kLanes) top[c / kLanes] = load_int(absmax + c);
  for (int64_t u = 0; u < task.units; ++u, row += x.cols, values += lanes) {
    if (u + ahead < task.units) prefetch_rows(row + ahead * x.cols, 0, 1, task.width);
    for (int c = 0; c < task.width; c += kLanes) {
      F y = load_up_to(row + c, task.width - c);
      top[c / kLanes] = max_int(top[c / kLanes], magnitude(y));
      store(values + c, y);
    }
  }
  for (int c = 0; c < lanes; c += kLanes) store_int(absmax + c, top[c / kLanes]);
}

void gather_columns(const Matrix& x, const Grouping& g, const ColumnTask& task, float* values,
                    uint32_t* absmax) {
  with_type(x.type, [&](auto t) {
    using T = decltype(t);
    if (g.rank == 0) return gather_plain<T>(x, task, values, absmax);
    gather_transformed<T>(x, g, task, values, absmax);
  });
  int64_t rows = task.units * rows_per_unit(g);
  int64_t tail = (rows + kTile - 1) / kTile * kTile - rows;
  std::memset(values + rows * lanes_of(task), 0, tail * lanes_of(task) * sizeof(float));
}

/// One tile: up to 64 rows of K by 16 columns.
template <bool Stochastic>
inline void emit_tile(const float* values, int lanes, I place, F factor, I usable, int qmax,
                      int8_t* q, int64_t q_stride, int columns, int rows) {
  I packed[16];
  const I step = set_int(kColHash);
  auto next = [&](int k) {
    F t = from_bits(bits(load(values + k * lanes) * factor) & usable);
    I r = clamp(round<Stochastic>(t, place), qmax);
    place += step;
    return r;
  };
  for (int i = 0; i < 16; ++i) {
    I a = next(4 * i), b = next(4 * i + 1), c = next(4 * i + 2), d = next(4 * i + 3);
    packed[i] = pack_lanes(a, b, c, d);
  }
  transpose(packed);
  if (columns >= kLanes && rows == kTile) {
    for (int c = 0; c < kLanes; ++c) store_int(q + c * q_stride, packed[c]);
    return;
  }
  for (int c = 0; c < columns && c < kLanes; ++c) store_bytes(q + c * q_stride, packed[c], rows);
}

template <bool Stochastic>
void emit_columns_of(const float* values, const ColumnTask& task, int64_t first, int64_t end,
                     const float* reciprocal, int qmax, const ColumnOutput& out) {
  const int lanes = lanes_of(task);
  for (int c = 0; c < task.width; c += kLanes) {
    const int64_t column = task.column + c;
    F factor = load(reciprocal + c);
    int32_t usable[16];
    for (int i = 0; i < kLanes; ++i) usable[i] = reciprocal[c + i] == 0 ? 0 : -1;
    I place = (set_int(static_cast<uint32_t>(column)) + lane_index()) * set_int(kRowHash);
    place += set_int(static_cast<uint32_t>(first) * kColHash);
    for (int64_t k = first; k < end; k += kTile) {
      int rows = static_cast<int>(end - k < kTile ? end - k : kTile);
      emit_tile<Stochastic>(values + (k - first) * lanes + c, lanes, place, factor,
                            load_int(usable), qmax, out.q + column * out.k + k, out.k,
                            task.width - c, rows);
      place += set_int(kTile * kColHash);
    }
  }
}

void emit_columns(const float* values, const ColumnTask& task, int64_t first, int64_t end,
                  const float* reciprocal, Rounding rounding, const ColumnOutput& out) {
  auto f = rounding.stochastic ? emit_columns_of<true> : emit_columns_of<false>;
  f(values, task, first, end, reciprocal, rounding.qmax, out);
}

}  // namespace hot::HOT_ISA
