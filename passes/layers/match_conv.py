"""One ``convolution_backward`` -> Site: its geometry and nodes, or why it stays exact."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.operators import FLOATS
from hot_compile.passes.base.site import ConvNodes, Convolution, Site

CONVOLUTION_BACKWARD = aten.convolution_backward.default
_MOST_DIMENSIONS = 3


def match_convolution(backward: fx.Node) -> tuple[fx.Node, Site]:
    """(forward convolution, Site) of a backward one; the backward itself where no forward fits.

    The forward is the convolution that read the very same x and weight. The Site is nameless.
    """
    grad_output, x = backward.args[:2]
    transposed, groups = backward.args[7], backward.args[9]
    forward = _forward(backward)
    conv = _convolution(backward)
    small = x if transposed else grad_output
    channels = conv.big_channels * conv.offsets
    small_channels = value_of(small).shape[1]
    outputs, inputs = (channels, small_channels) if transposed else (small_channels, channels)
    refusal = _refusal(backward, forward, groups)
    site = Site(
        name="",
        rows=value_of(small).numel() // small_channels,
        outputs=outputs,
        inputs=inputs // groups if isinstance(groups, int) else inputs,
        dtype=value_of(grad_output).dtype,
        device=value_of(grad_output).device,
        lead=(conv.batch, *conv.small_size),
        batched=True,
        head=False,
        refusal=refusal,
        nodes=None if refusal else _nodes(backward, forward),
        conv=conv,
    )
    return forward or backward, site


def _forward(backward: fx.Node) -> fx.Node | None:
    x, weight = backward.args[1:3]
    settings = tuple(backward.args[4:10])
    for user in x.users:  # type: ignore[union-attr]
        same = user.target is aten.convolution.default and user.args[:2] == (x, weight)
        if same and tuple(user.args[3:9]) == settings:
            return user
    return None


def _refusal(backward: fx.Node, forward: fx.Node | None, groups: Any) -> str | None:
    grad_output, x, weight = backward.args[:3]
    dtypes = {value_of(node).dtype for node in (grad_output, x, weight)}
    dimensions = value_of(x).dim() - 2
    if groups != 1:
        kind = "depthwise" if groups == value_of(x).shape[1] else f"grouped ({groups} groups)"
        return f"{kind} convolution: left alone, as in the paper"
    if len(dtypes) > 1 or not dtypes <= FLOATS:
        return f"convolution of {', '.join(sorted(map(str, dtypes)))} is not quantised"
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        return f"convolution in {dimensions} dimensions"
    if forward is None:
        return "not paired with a forward convolution"
    sizes = (*value_of(x).shape[1:], *value_of(grad_output).shape[1:])
    if not all(isinstance(size, int) for size in sizes):
        return "its channels or spatial sizes are symbolic"
    return None


def _convolution(backward: fx.Node) -> Convolution:
    grad_output, x, weight = map(value_of, backward.args[:3])
    transposed = bool(backward.args[7])
    small, big = (x, grad_output) if transposed else (grad_output, x)
    dimensions = x.dim() - 2
    return Convolution(
        batch=x.shape[0],
        small_size=tuple(small.shape[2:]),
        big_size=tuple(big.shape[2:]),
        big_channels=big.shape[1],
        kernel=tuple(weight.shape[2:]),
        stride=each_dimension(backward.args[4], dimensions),
        padding=each_dimension(backward.args[5], dimensions),
        dilation=each_dimension(backward.args[6], dimensions),
        transposed=transposed,
        rows_last=_channels_last(x),
    )


def each_dimension(values: Any, dimensions: int) -> tuple[int, ...]:
    """A setting for each dimension; autograd may give one for all."""
    settings: Sequence[int] = tuple(values)
    return tuple(settings) if len(settings) == dimensions else tuple(settings) * dimensions


def _channels_last(x: torch.Tensor) -> bool:
    """Channels of one position lie together in memory."""
    return x.stride(1) == 1 and (x.shape[1] > 1 or math.prod(x.shape[2:]) == 1)


def _nodes(backward: fx.Node, forward: fx.Node | None) -> ConvNodes:
    assert forward is not None
    grad_output, x, weight = backward.args[:3]
    mask: Sequence[bool] = backward.args[10]  # type: ignore[assignment]
    parts = {u.args[1]: u for u in backward.users if u.target is operator.getitem and u.users}
    parts = {index: node for index, node in parts.items() if mask[index]}  # type: ignore[index]
    return ConvNodes(
        x=x,  # type: ignore[arg-type]
        weight=weight,  # type: ignore[arg-type]
        grad_output=grad_output,  # type: ignore[arg-type]
        backward=backward,
        grad_input=parts.get(0),
        grad_weight=parts.get(1),
        grad_bias=parts.get(2),
        forward=forward,
    )
