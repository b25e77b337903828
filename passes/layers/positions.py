"""A convolution's tensors as rows of positions; or nodes in their place (``Traced``)."""

from __future__ import annotations

from torch import Tensor

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.site import Convolution


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
