"""A convolution's tensors as rows of positions; or nodes in their place (``Traced``)."""

from __future__ import annotations

from torch import Tensor

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.site import Convolution
from hot_compile.runtime.reference.conv import Sizes, tile_counts, tile_shape


def channels_last(tensor: Tensor) -> Tensor:
    """[B, C, *size] -> [B, *size, C]."""
    return aten.permute.default(tensor, [0, *range(2, len(tensor.shape)), 1])


def rows_of(tensor: Tensor) -> Tensor:
    """[B, C, *size] -> [positions, C]."""
    return aten.reshape.default(channels_last(tensor), [-1, tensor.shape[1]])


def unfolded(big: Tensor, conv: Convolution) -> Tensor:
    """[B, C, *size] -> im2col rows [L, kk * C]."""
    dims = len(conv.kernel)
    pad = [p for padding in reversed(conv.padding) for p in (padding, padding)]
    x = aten.constant_pad_nd.default(big, pad, 0.0) if any(pad) else big
    for i in range(dims):
        span = (conv.kernel[i] - 1) * conv.dilation[i] + 1
        x = aten.unfold.default(x, 2 + i, span, conv.stride[i])
    for i in range(dims):
        if conv.dilation[i] > 1:
            end, step = 2**63 - 1, conv.dilation[i]
            x = aten.slice.Tensor(x, 2 + dims + i, 0, end, step)
    x = aten.permute.default(x, [0, *range(2, 2 + 2 * dims), 1])
    return aten.reshape.default(x, [-1, conv.offsets * conv.big_channels])


def tiled(rows: Tensor, small_size: Sizes) -> Tensor:
    """[L, C] -> [batch * tiles * 16, C]: rows in order of 16-position tiles, zero over the edge.

    What ``quantize_columns(..., rank, 1, ...)`` then takes as a group of 16 consecutive rows.
    """
    channels, dims = rows.shape[1], len(small_size)
    shape, counts = tile_shape(dims), tile_counts(small_size)
    pad = [0, 0]
    for n, tile, count in reversed(list(zip(small_size, shape, counts, strict=True))):
        pad += [0, tile * count - n]
    x = aten.reshape.default(rows, [-1, *small_size, channels])
    if any(pad):
        x = aten.constant_pad_nd.default(x, pad, 0.0)
    split = [n for pair in zip(counts, shape, strict=True) for n in pair]
    order = [1 + 2 * i for i in range(dims)] + [2 + 2 * i for i in range(dims)]
    x = aten.reshape.default(x, [-1, *split, channels])
    x = aten.permute.default(x, [0, *order, 1 + 2 * dims])
    return aten.reshape.default(x, [-1, channels])
