"""Joint graph -> the same with exact convolutions over patches as the products that they are.

A patch embedding's kernels do not overlap: it is a product of patches and weights. cuDNN has no
tensor-core kernel for an image's three channels as they lie; it lays image and gradient out anew
and pads the channels. On an H200 that takes 3.1 of a ViT-B's 72 ms a step (bf16, batch 256), the
product a tenth of it. Values differ by rounding alone: the same terms are added in another order.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter, channels_first, node_of
from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.operators import FLOATS
from hot_compile.passes.exact.first_conv import backwards_of, slow_in_cudnn, wants_grad_input
from hot_compile.passes.layers.match_conv import each_dimension


def applies(conv: fx.Node) -> bool:
    """Every element of x is read exactly once, and nobody wants its gradient."""
    settings: Any = conv.args[3:9]
    stride, padding, dilation, transposed, _, groups = settings
    (_, *sizes), kernel = value_of(conv.args[0]).shape, value_of(conv.args[1]).shape[2:]
    if not all(isinstance(n, int) for n in sizes) or transposed or groups != 1:
        return False
    if any(padding) or any(n != 1 for n in dilation):
        return False
    if each_dimension(stride, len(kernel)) != tuple(kernel):
        return False
    if any(size % length for size, length in zip(sizes[1:], kernel, strict=True)):
        return False
    return not any(wants_grad_input(backward) for backward in backwards_of(conv))


def pays(x: torch.Tensor, tf32: bool) -> str:
    """'' where cuDNN has no fast kernel for x's channels and a product is as precise; else why not.

    ``tf32``: fp32 products may use it, as cuDNN does.
    """
    if problem := slow_in_cudnn(x):
        return problem
    if x.dtype is torch.float32 and not tf32:
        return "a product would be slower: it may not use TF32, as cuDNN does"
    return "" if x.dtype in FLOATS else f"not measured in {x.dtype}"


def replace(graph: fx.Graph, conv: fx.Node) -> bool:
    """Give a convolution over patches, and its backward, the form of products."""
    x, weight, bias = conv.args[:3]
    emit = Emitter(graph, conv, conv)
    batch, kernel = emit.size(x, 0), value_of(weight).shape[2:]  # type: ignore[arg-type]
    rows = _patches(emit, x, batch, kernel)
    matrix = emit(aten.reshape.default, weight, [value_of(weight).shape[0], -1])
    columns = emit.permute(matrix, [1, 0])
    if bias is None:
        y = emit(aten.mm.default, rows, columns)
    else:
        y = emit(aten.addmm.default, bias, rows, columns)
    backwards = backwards_of(conv)
    conv.replace_all_uses_with(_as_image(emit, y, batch, value_of(conv)))
    for backward in backwards:
        _replace_backward(graph, backward, rows)
    return True


def _patches(emit: Emitter, x: Any, batch: Any, kernel: torch.Size) -> fx.Node:
    """[B, C, *size] -> [positions, C * kernel], as the weight's rows lie."""
    channels, *sizes = value_of(x).shape[1:]
    pairs = [(size // length, length) for size, length in zip(sizes, kernel, strict=True)]
    x = emit(aten.reshape.default, x, [batch, channels, *(n for pair in pairs for n in pair)])
    places, within = range(2, x.meta["val"].dim(), 2), range(3, x.meta["val"].dim(), 2)
    x = emit.permute(x, [0, *places, 1, *within])
    return emit(aten.reshape.default, x, [-1, channels * math.prod(kernel)])


def _as_image(emit: Emitter, rows: fx.Node, batch: Any, like: torch.Tensor) -> fx.Node:
    """[positions, O] -> [B, O, *size], laid out as ``like``."""
    image = emit(aten.reshape.default, rows, [batch, *like.shape[2:], like.shape[1]])
    return node_of(channels_first(emit.traced(image), like))


def _replace_backward(graph: fx.Graph, backward: fx.Node, rows: fx.Node) -> None:
    """g_w = g_y^T patches, g_b = the sum of g_y's rows."""
    grad_output, _, weight = backward.args[:3]
    emit = Emitter(graph, backward, backward)
    shape = list(value_of(weight).shape)
    last = emit.permute(grad_output, [0, *range(2, len(shape)), 1])  # type: ignore[arg-type]
    g = emit(aten.reshape.default, last, [-1, shape[0]])
    for part in [user for user in backward.users if user.target is operator.getitem]:
        if part.args[1] == 1:
            product = emit(aten.mm.default, emit.permute(g, [1, 0]), rows)
            new = emit(aten.reshape.default, product, shape)
        else:
            new = emit(aten.sum.dim_IntList, g, [0])
        part.replace_all_uses_with(new)
