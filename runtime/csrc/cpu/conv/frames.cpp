#include "cpu/conv/frames.hpp"

#include <cstring>

namespace hot::cpu {
namespace {

/// Zero positions that begin (end) every row of a phase's frame of `length`.
int64_t zeros_before(const Axis& a, int64_t phase) {
  return a.padding > phase ? ceil_div(a.padding - phase, a.step) : 0;
}
int64_t zeros_after(const Axis& a, int64_t phase, int64_t length) {
  int64_t end = a.big + a.padding - phase;  // first position beyond the big tensor
  return std::max<int64_t>(0, length - (end > 0 ? ceil_div(end, a.step) : 0));
}

Axis axis_of(const Convolution& g, int d, int64_t tile) {
  Axis a{ceil_div(g.small[d], tile),
         g.stride[d] * tile,
         tile,
         g.stride[d],
         g.dilation[d],
         g.padding[d],
         g.big[d],
         g.small[d],
         0,
         {}};
  for (int64_t e = 0; e < tile; ++e) {
    for (int64_t k = 0; k < g.kernel[d]; ++k) a.phases.push_back(a.offset(e, k) % a.step);
  }
  std::sort(a.phases.begin(), a.phases.end());
  a.phases.erase(std::unique(a.phases.begin(), a.phases.end()), a.phases.end());
  a.furthest = a.shift(a.offset(tile - 1, g.kernel[d] - 1));
  const int64_t whole = a.count + a.furthest;
  int64_t shared = a.furthest;
  for (int64_t phase : a.phases) {
    shared = std::min({shared, zeros_before(a, phase), zeros_after(a, phase, whole)});
  }
  a.length = whole - shared;
  return a;
}

/// One row of a phase: the big row's positions phase - padding + f * step.
void fill_row(const Axis& a, int64_t phase, const int8_t* source, int8_t* row) {
  const int64_t first = zeros_before(a, phase);
  const int64_t end = a.length - zeros_after(a, phase, a.length);
  if (first >= end) return;
  const int8_t* from = source + phase - a.padding;
  if (a.step == 1) {
    std::memcpy(row + first, from + first, end - first);
    return;
  }
  for (int64_t f = first; f < end; ++f) row[f] = from[f * a.step];
}

}  // namespace

int64_t Axis::slot(int64_t offset) const {
  return std::find(phases.begin(), phases.end(), offset % step) - phases.begin();
}

Frames::Frames(const Convolution& g, const int64_t (&tile)[3])
    : axes{axis_of(g, 0, tile[0]), axis_of(g, 1, tile[1]), axis_of(g, 2, tile[2])},
      batch(g.batch) {}

int64_t Frames::size() const { return batch * axes[0].length * axes[1].length * axes[2].length; }

int64_t Frames::phases() const {
  return static_cast<int64_t>(axes[0].phases.size() * axes[1].phases.size() *
                              axes[2].phases.size());
}

int64_t Frames::slack() const {
  const auto& [a0, a1, a2] = axes;
  return (a0.furthest * a1.length + a1.furthest) * a2.length + a2.furthest;
}

int64_t Frames::start(const int64_t (&k)[3], const int64_t (&e)[3]) const {
  int64_t phase = 0, shift = 0;
  for (int d = 0; d < 3; ++d) {
    const Axis& a = axes[d];
    const int64_t offset = a.offset(e[d], k[d]);
    phase = phase * static_cast<int64_t>(a.phases.size()) + a.slot(offset);
    shift = shift * a.length + a.shift(offset);
  }
  return phase * size() + shift;
}

void Frames::fill_big(const int8_t* source, int8_t* frames) const {
  const auto& [a0, a1, a2] = axes;
  std::memset(frames, 0, phases() * size());
  for (int64_t p0 : a0.phases) {
    for (int64_t p1 : a1.phases) {
      for (int64_t p2 : a2.phases) {
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t f0 = 0; f0 < a0.length; ++f0) {
            for (int64_t f1 = 0; f1 < a1.length; ++f1, frames += a2.length) {
              const int64_t at0 = f0 * a0.step + p0 - a0.padding;
              const int64_t at1 = f1 * a1.step + p1 - a1.padding;
              if (at0 < 0 || at0 >= a0.big || at1 < 0 || at1 >= a1.big) continue;
              const int64_t row = (b * a0.big + at0) * a1.big + at1;
              fill_row(a2, p2, source + row * a2.big, frames);
            }
          }
        }
      }
    }
  }
}

void Frames::fill_small(const int8_t* source, int64_t parts, int8_t* frame) const {
  const auto& [a0, a1, a2] = axes;
  const int64_t part_size = size();
  std::memset(frame, 0, parts * part_size);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i0 = 0; i0 < a0.count; ++i0) {
      for (int64_t i1 = 0; i1 < a1.count; ++i1) {
        int8_t* row = frame + ((b * a0.length + i0) * a1.length + i1) * a2.length;
        if (parts == 1) std::memcpy(row, source, a2.count);
        for (int64_t i = 0; parts > 1 && i < a2.count; ++i) {
          for (int64_t part = 0; part < parts; ++part) {
            row[part * part_size + i] = source[i * parts + part];
          }
        }
        source += a2.count * parts;
      }
    }
  }
}

Convolution convolution_of(const char* op, int64_t batch, const Sizes& small_size,
                           const Sizes& big_size, const Sizes& kernel, const Sizes& stride,
                           const Sizes& padding, const Sizes& dilation) {
  const size_t n = kernel.size();
  HOT_CHECK(n >= 1 && n <= 3, op, "expected a kernel of 1 to 3 dimensions; got ", n);
  for (const auto* list : {&small_size, &big_size, &stride, &padding, &dilation}) {
    HOT_CHECK(list->size() == n, op, "expected ", n, " sizes, strides, paddings and dilations each",
              "; got ", list->size());
  }
  Convolution c{batch, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}};
  for (size_t i = 0; i < n; ++i) {
    const size_t d = 3 - n + i;
    c.small[d] = small_size[i];
    c.big[d] = big_size[i];
    c.kernel[d] = kernel[i];
    c.stride[d] = stride[i];
    c.padding[d] = padding[i];
    c.dilation[d] = dilation[i];
    HOT_CHECK(batch >= 0 && small_size[i] >= 0 && big_size[i] >= 0 && kernel[i] >= 1 &&
                  stride[i] >= 1 && padding[i] >= 0 && dilation[i] >= 1,
              op, "expected sizes and padding >= 0, kernel, stride and dilation >= 1; got a ",
              "dimension of small ", small_size[i], ", big ", big_size[i], ", kernel ", kernel[i],
              ", stride ", stride[i], ", padding ", padding[i], ", dilation ", dilation[i]);
  }
  return c;
}

}  // namespace hot::cpu
