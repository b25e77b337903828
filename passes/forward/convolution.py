"""y = conv(x, W) on INT8: one plain function, traced into graphs, and measured on tensors.

Two forms, both of the backward's operators. Where the kernel moves by one, and in transposed
convolutions, x's rows are multiplied with every kernel offset's weight and the products added up
where they belong, as g_x is (docs/adr/0006). Else x is unfolded, and y is one product of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hot_compile.runtime.ops  # noqa: F401  (defines the operators)
from hot_compile.passes.base.emit import channels_first
from hot_compile.passes.base.site import Convolution
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.passes.layers.positions import channels_last, rows_of, unfolded

aten, hot, prims = torch.ops.aten, torch.ops.hot, torch.ops.prims


def folds(conv: Convolution) -> bool:
    """y is added up of products of x's rows; else it is one product of rows of the unfolded x."""
    if conv.is_product:
        return False
    return conv.transposed or (set(conv.stride) == {1} and min(_border(conv)) >= 0)


def unfolding(conv: Convolution) -> float:
    """How many times as large as x what a product of rows reads is; 0 where x is not unfolded."""
    if folds(conv) or conv.is_product:
        return 0.0
    return conv.offsets * math.prod(conv.small_size) / max(1, math.prod(conv.big_size))


def int8_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ones: Callable[[Tensor], Tensor],
    conv: Convolution,
    like: Tensor,
) -> Tensor:
    """y, of the shape, layout and dtype of ``like``, from integers rounded to nearest.

    x has a scale per position (of what the kernel sees there, where it is unfolded), W one per
    output, and per offset of the kernel where products are added up. Both are transformed along
    channels in blocks of 16 before, which cancels in the product.

    Args:
        x: [B, C_in, *size]. weight: as the convolution's own. bias: [C_out], of y's dtype.
        ones: makes a vector of ones, fp32, as long as the rows it is given.
    """
    if folds(conv):
        y = _added_up(x, weight, conv, like.dtype)
        y = y if bias is None else aten.add.Tensor(y, bias)
    else:
        y = _product(x, weight, bias, ones, conv, like)
    return channels_first(y, like)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ones: Callable[[Tensor], Tensor],
    conv: Convolution,
    like: Tensor,
) -> Tensor:
    """[B, *size, C_out] of rows of x as the kernel sees them; the bias in the epilogue."""
    rows = rows_of(x) if conv.is_product else unfolded(x, conv)
    matrix = aten.reshape.default(channels_last(weight), [weight.shape[0], -1])
    one = ones(rows) if bias is not None else None
    if bias is not None:
        bias = prims.convert_element_type.default(bias, torch.float32)
    form = Form(weight_is_io=conv.transposed)
    y = int8_product(rows, matrix, one, bias, form, like.dtype)
    return aten.reshape.default(y, [-1, *like.shape[2:], like.shape[1]])


def _added_up(x: Tensor, weight: Tensor, conv: Convolution, dtype: torch.dtype) -> Tensor:
    """[B, *size, C_out]: a convolution that moves by one is a transposed one of the kernel turned
    round, from x to y."""
    batch: Any = conv.batch if isinstance(conv.batch, int) else aten.sym_size.int(x, 0)
    spatial = range(2, len(weight.shape))
    if conv.transposed:
        sizes = conv.small_size, conv.big_size, conv.kernel, conv.stride, conv.padding
        by_offset = aten.permute.default(weight, [*spatial, 1, 0])
    else:
        sizes = conv.big_size, conv.small_size, conv.kernel, conv.stride, _border(conv)
        by_offset = aten.permute.default(prims.rev.default(weight, [*spatial]), [*spatial, 0, 1])
    x_q, x_scale = hot.quantize_rows.default(rows_of(x), 8, True, False)
    matrix = aten.reshape.default(by_offset, [-1, x.shape[1]])
    w_q, w_scale = hot.quantize_rows.default(matrix, 8, True, False)
    geometry = (batch, *map(list, (*sizes, conv.dilation)))
    return hot.conv_grad_input.default(x_q, w_q, x_scale, w_scale, *geometry, dtype)


def _border(conv: Convolution) -> tuple[int, ...]:
    """How far the kernel reaches beyond what it is padded by, in each dimension."""
    axes = zip(conv.kernel, conv.dilation, conv.padding, strict=True)
    return tuple((k - 1) * d - p for k, d, p in axes)
