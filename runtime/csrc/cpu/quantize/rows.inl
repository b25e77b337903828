// quantize_rows: HT16 along each row, one row at a time through a buffer that stays in L1.

namespace hot::HOT_ISA {

template <class T>
inline F load_block(const T* row, int64_t column, int64_t cols) {
  int64_t left = cols - column;
  return left >= kLanes ? load(row + column) : load_n(row + column, static_cast<int>(left));
}

template <class T>
inline F transform_block(const Matrix& m, const T* row, int64_t column) {
  F x = load_block(row, column, m.cols);
  if (m.factors) x *= load_block(m.factors, column, m.cols);
  return hadamard_lanes(x) * 0.25f;
}

template <class T>
void rows_absmax_of(const Matrix& x, int64_t begin, int64_t end, uint32_t* absmax) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(x.data) + r * x.cols;
    I top = set_int(0);
    for (int64_t c = 0; c < x.cols; c += kLanes) {
      top = max_int(top, magnitude(transform_block(x, row, c)));
    }
    absmax[r] = largest_lane(top);
  }
}

template <bool Stochastic>
inline void quantize_row(const float* values, int64_t padded, float reciprocal, int qmax,
                         uint32_t row, int8_t* q) {
  F factor = set(reciprocal);
  I place = set_int(row * kRowHash) + lane_index() * set_int(kColHash);
  for (int64_t c = 0; c < padded; c += kLanes) {
    store_narrow(q + c, clamp(round<Stochastic>(load(values + c) * factor, place), qmax));
    place += set_int(kLanes * kColHash);
  }
}

template <class T, bool Stochastic>
void quantize_rows_of(const Matrix& x, int64_t begin, int64_t end, int qmax, const Scale* shared,
                      float* buffer, const RowOutput& out) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(x.data) + r * x.cols;
    I top = set_int(0);
    for (int64_t c = 0; c < x.cols; c += kLanes) {
      F y = transform_block(x, row, c);
      top = max_int(top, magnitude(y));
      store(buffer + c, y);
    }
    Scale scale = shared ? *shared : scale_of(largest_lane(top), qmax);
    out.scale[r] = scale.scale;
    int8_t* q = out.q + r * out.padded_cols;
    if (scale.reciprocal == 0) {
      clear(q, out.padded_cols);
      continue;
    }
    quantize_row<Stochastic>(buffer, out.padded_cols, scale.reciprocal, qmax,
                             static_cast<uint32_t>(r), q);
  }
}

/// Calls f with a value of the element type.
template <class Fn>
inline void with_type(Float type, Fn f) {
  switch (type) {
    case Float::f32:
      return f(float{});
    case Float::bf16:
      return f(BFloat16{});
    case Float::f16:
      return f(Half{});
  }
}

void rows_absmax(const Matrix& x, int64_t begin, int64_t end, uint32_t* absmax) {
  with_type(x.type, [&](auto t) { rows_absmax_of<decltype(t)>(x, begin, end, absmax); });
}

void quantize_rows(const Matrix& x, int64_t begin, int64_t end, Rounding rounding,
                   const Scale* shared, float* buffer, const RowOutput& out) {
  with_type(x.type, [&](auto t) {
    auto f = rounding.stochastic ? quantize_rows_of<decltype(t), true>
                                 : quantize_rows_of<decltype(t), false>;
    f(x, begin, end, rounding.qmax, shared, buffer, out);
  });
}

}  // namespace hot::HOT_ISA
