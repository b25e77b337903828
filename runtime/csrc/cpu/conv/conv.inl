// Convolutions: products added up where the kernel lay, and the transform of unfolded tiles.

namespace hot::HOT_ISA {

/// out += product * row_scale * column_scale over n channels.
inline void fold_channels(const int32_t* product, F row_scale, const float* column_scale,
                          float* out, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    F y = to_float(load_int(product + c)) * row_scale * load(column_scale + c);
    store(out + c, load(out + c) + y);
  }
  if (c == n) return;
  int left = static_cast<int>(n - c);
  F y = to_float(load_int_n(product + c, left)) * row_scale * load_n(column_scale + c, left);
  store_n(out + c, load_n(out + c, left) + y, left);
}

void fold(const Fold& f, int64_t positions, int64_t begin, int64_t end) {
  const Convolution& g = *f.conv;
  const int64_t offsets = g.kernel[0] * g.kernel[1] * g.kernel[2];
  const int32_t* product = f.product + begin;
  for (int64_t i = 0; i < positions; ++i) {
    const int64_t p = f.first + i, row = p / g.small[2];
    const int64_t base0 = row / g.small[1] * g.stride[0] - g.padding[0];
    const int64_t base1 = row % g.small[1] * g.stride[1] - g.padding[1];
    const int64_t base2 = p % g.small[2] * g.stride[2] - g.padding[2];
    F row_scale = set(f.row_scale[i]);
    int64_t k = 0;
    for (int64_t k0 = 0; k0 < g.kernel[0]; ++k0) {
      const int64_t at0 = base0 + k0 * g.dilation[0];
      for (int64_t k1 = 0; k1 < g.kernel[1]; ++k1) {
        const int64_t at1 = base1 + k1 * g.dilation[1];
        const bool inside = at0 >= 0 && at0 < g.big[0] && at1 >= 0 && at1 < g.big[1];
        for (int64_t k2 = 0; k2 < g.kernel[2]; ++k2, ++k) {
          const int64_t at2 = base2 + k2 * g.dilation[2];
          if (!inside || at2 < 0 || at2 >= g.big[2]) continue;
          const int64_t at = (at0 * g.big[1] + at1) * g.big[2] + at2;
          fold_channels(product + k * f.channels, row_scale,
                        f.column_scale + k * f.channels + begin, f.out + at * f.channels + begin,
                        end - begin);
        }
      }
    }
    product += offsets * f.channels;
  }
}

template <class T>
inline void store_floats_of(const float* values, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int left = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    store_n(out + i, load_n(values + i, left), left);
  }
}

void store_floats(const float* values, int64_t n, Float type, void* out) {
  with_type(type, [&](auto t) { store_floats_of(values, n, static_cast<decltype(t)*>(out)); });
}

constexpr int kTileBlock = 32;  // loops over a block's tiles are vectorised by the compiler

/// A block's sums, divided by 16 and rounded half up, into `out`, [kept, out_stride].
inline void transform_block(int16_t (&x)[16][kTileBlock], uint32_t kept, int8_t* out,
                            int64_t out_stride, int64_t n) {
#pragma GCC unroll 4
  for (int distance = 1; distance < 16; distance *= 2) {
#pragma GCC unroll 16
    for (int e = 0; e < 16; ++e) {
      if (e & distance) continue;
      int16_t *low = x[e], *high = x[e + distance];
      for (int i = 0; i < kTileBlock; ++i) {
        int16_t a = low[i], b = high[i];
        low[i] = static_cast<int16_t>(a + b);
        high[i] = static_cast<int16_t>(a - b);
      }
    }
  }
  for (int e = 0; e < 16; ++e) {
    if (!(kept >> e & 1)) continue;
    int8_t q[kTileBlock];
    for (int i = 0; i < kTileBlock; ++i) {
      q[i] = static_cast<int8_t>(static_cast<int16_t>(x[e][i] + 8) >> 4);
    }
    std::memcpy(out, q, n);
    out += out_stride;
  }
}

void transform_tiles(const Tiles& t) {
  alignas(64) int16_t x[16][kTileBlock];
  // whole blocks, the last one over part of the one before
  const int64_t whole = t.n < kTileBlock ? 0 : (t.n + kTileBlock - 1) / kTileBlock;
  for (int64_t block = 0; block < whole; ++block) {
    int64_t first = block * kTileBlock;
    first = first + kTileBlock <= t.n ? first : t.n - kTileBlock;
    for (int e = 0; e < 16; ++e) {
      const int8_t* from = t.elements[e] + first;
      for (int i = 0; i < kTileBlock; ++i) x[e][i] = from[i];
    }
    transform_block(x, t.kept, t.out + first, t.n, kTileBlock);
  }
  if (whole > 0) return;
  std::memset(x, 0, sizeof(x));
  for (int e = 0; e < 16; ++e) {
    for (int64_t i = 0; i < t.n; ++i) x[e][i] = t.elements[e][i];
  }
  transform_block(x, t.kept, t.out, t.n, t.n);
}

}  // namespace hot::HOT_ISA
