// The epilogue of scaled_int_mm, and the exact product for machines without VNNI.

namespace hot::HOT_ISA {

/// Sixteen sums as fp32, rounded once.
inline F load_product(const Epilogue& e, int64_t at, int n) {
  if (e.num_parts == 1) {
    return to_float(n == kLanes ? load_int(e.parts[0] + at) : load_int_n(e.parts[0] + at, n));
  }
  float sums[16] = {};
  for (int i = 0; i < n; ++i) {
    int64_t sum = 0;
    for (int p = 0; p < e.num_parts; ++p) sum += e.parts[p][at + i];
    sums[i] = static_cast<float>(sum);
  }
  return load(sums);
}

template <class T>
void epilogue_of(const Epilogue& e, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    F row_scale = set(e.row_scale[row]);
    F row_term = set(e.row_term ? e.row_term[row] : 0.0f);
    T* out = static_cast<T*>(e.out) + row * e.out_stride;
    for (int64_t c = 0; c < e.n; c += kLanes) {
      int n = static_cast<int>(e.n - c < kLanes ? e.n - c : kLanes);
      F y = load_product(e, row * e.n + c, n) * row_scale;
      y *= load_up_to(e.col_scale + c, n);
      if (e.row_term) y += row_term * load_up_to(e.col_term + c, n);
      store_n(out + c, y, n);
    }
  }
}

void epilogue(const Epilogue& e, int64_t begin, int64_t end) {
  with_type(e.type, [&](auto t) { epilogue_of<decltype(t)>(e, begin, end); });
}

void int_product(const IntProduct& p, int64_t begin, int64_t end) {
  constexpr int64_t block = 32;  // rows of b kept in cache while all rows of a pass by
  for (int64_t j0 = 0; j0 < p.n; j0 += block) {
    int64_t j1 = j0 + block < p.n ? j0 + block : p.n;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = j0; j < j1; ++j) {
        p.out[i * p.n + j] = dot(p.a + i * p.a_stride, p.b + j * p.b_stride, p.k);
      }
    }
  }
}

}  // namespace hot::HOT_ISA
