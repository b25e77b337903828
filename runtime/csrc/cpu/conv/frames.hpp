// Frames: the two sides of a convolution laid out so that for every kernel offset its product over
// positions reads one contiguous run of each, with nothing unfolded.
//
// The big tensor is split into phases, its positions modulo the step between small ones; within a
// phase, a kernel offset is a shift. Rows of a frame are longer than the small tensor's by the
// furthest shift; there the small side holds zeros, so what a shift drags across an edge counts for
// nothing. Zero padding that ends one row also begins the next.
#pragma once

#include "cpu/common/ops.hpp"

namespace hot::cpu {

/// One dimension's step, phases and length of frames.
struct Axis {
  int64_t count;  // small positions, or tiles of them
  int64_t step;   // big positions from one to the next
  int64_t tile;   // small positions a tile has (1: no tiles)
  int64_t stride, dilation, padding, big, small;
  int64_t furthest;             // shift
  int64_t length;               // of a frame
  std::vector<int64_t> phases;  // those that some offset reads

  int64_t offset(int64_t element, int64_t k) const { return element * stride + k * dilation; }
  int64_t shift(int64_t offset) const { return offset / step; }
  int64_t slot(int64_t offset) const;  // place of the offset's phase in `phases`
};

struct Frames {
  Axis axes[3];
  int64_t batch;

  /// tiles: Hadamard tiles of 16 small positions, by the number of dimensions that the user gave.
  Frames(const Convolution&, const int64_t (&tile)[3]);

  int64_t size() const;    // positions of one frame, batch included
  int64_t phases() const;  // frames of one channel
  int64_t slack() const;   // bytes that the furthest shift reads beyond a frame
  /// Start of what kernel offset k and element e of a tile see, within a channel's frames.
  int64_t start(const int64_t (&k)[3], const int64_t (&e)[3]) const;

  /// Writes one channel's frames, [phases, size].
  void fill_big(const int8_t* source, int8_t* frames) const;
  /// Writes one channel of the small side, [parts, size], from [tiles, parts].
  void fill_small(const int8_t* source, int64_t parts, int8_t* frame) const;
};

}  // namespace hot::cpu
