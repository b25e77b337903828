"""Joint graph -> the same with convolutions of signals as those of images one row high.

cuDNN's half-precision kernels want channels last. Torch hands it signals channels first, however
they lie, and it turns them round before and behind each call: 10 of the 48 ms of a HuBERT's step
on an H200. An image may lie channels last, where the kernel that makes it writes it so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter, ForwardEmitter
from hot_compile.passes.base.graph import aten, rank_of, value_of
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.cost.images import CHOSEN, RatesOf, channels_last_wins, kind_of
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD, each_dimension

_SIGNAL_DIMS = 3
_ROW_DIM = 2
_NEUTRAL = 1, 0, 1, 0
"""Stride, padding, dilation and output padding along a single row."""


def as_images(graph: fx.Graph, rates: RatesOf) -> int:
    """Convolutions of signals, and their backwards, become those of images that lie channels last,
    if the graph's device was timed to be faster so: they alone, and with images beside them, which
    then lie so, too. Says how many."""
    targets = aten.convolution.default, CONVOLUTION_BACKWARD
    convolutions = [node for node in graph.nodes if node.target in targets]
    signals = [node for node in convolutions if _is_signals(node)]
    if not signals:
        return 0
    turned = {read for node in signals for read in _reads(node) if _comes_from_outside(read)}
    edges = sum(bytes_of(value_of(read)) for read in turned)
    sets = [signals] if len(signals) == len(convolutions) else [signals, convolutions]
    if not all(channels_last_wins(nodes, edges, rates, signals=True) for nodes in sets):
        return 0
    images: dict[fx.Node, fx.Node] = {}
    for node in signals:
        (_replace if node.target is aten.convolution.default else _replace_backward)(node, images)
    graph.eliminate_dead_code()
    return len(signals)


def _is_signals(node: fx.Node) -> bool:
    """Of sizes that are known, too: others are not timed, and their strides not compared."""
    read: Any = node.args[0]
    return rank_of(read) == _SIGNAL_DIMS and kind_of(node, signals=True) is not None


def _reads(node: fx.Node) -> list[Any]:
    """The signals among its arguments: not its weight, nor a bias."""
    return list(node.args[: 1 if node.target is aten.convolution.default else 2])


def _comes_from_outside(read: fx.Node) -> bool:
    while read.target in VIEWS or read.target in CASTS:
        read = read.args[0]  # type: ignore[assignment]
    return read.op == "placeholder"


def _image(emit: Emitter, signal: Any, images: dict[fx.Node, fx.Node]) -> fx.Node:
    """[B, C, L] -> [B, C, 1, L], channels last; the one there is, where two ask for it."""
    if signal not in images:
        row = emit(aten.unsqueeze.default, signal, _ROW_DIM)
        images[signal] = emit(aten.clone.default, row, memory_format=torch.channels_last)
        images[signal].meta[CHOSEN] = True
    return images[signal]


def _settings(stride: Any, padding: Any, dilation: Any, transposed: Any, output: Any) -> list[Any]:
    """A convolution's, of signals, as of images."""
    lists = [
        [neutral, *each_dimension(given, 1)]
        for neutral, given in zip(_NEUTRAL, (stride, padding, dilation, output), strict=True)
    ]
    return [*lists[:3], transposed, lists[3]]


def _signal(emit: Emitter, image: fx.Node, like: torch.Tensor) -> fx.Node:
    """[B, C, 1, L] -> [B, C, L], with the strides that the graph was traced with."""
    row = emit(aten.squeeze.dim, image, _ROW_DIM)
    if value_of(row).stride() == like.stride() or not like.is_contiguous():
        return row
    return emit(aten.clone.default, row, memory_format=torch.contiguous_format)


def _replace(conv: fx.Node, images: dict[fx.Node, fx.Node]) -> None:
    x, weight, bias, *settings, groups = conv.args
    emit = ForwardEmitter(conv.graph, conv, conv)
    read, kernel = _image(emit, x, images), _image(emit, weight, images)
    y = emit(aten.convolution.default, read, kernel, bias, *_settings(*settings), groups)
    emit.put_in_place(_signal(emit, y, value_of(conv)))


def _replace_backward(backward: fx.Node, images: dict[fx.Node, fx.Node]) -> None:
    grad_output, x, weight, bias_sizes, *settings, groups, mask = backward.args
    emit = Emitter(backward.graph, backward, backward)
    operands = [_image(emit, operand, images) for operand in (grad_output, x, weight)]
    rest = bias_sizes, *_settings(*settings), groups, mask
    new = emit(CONVOLUTION_BACKWARD, *operands, *rest)
    for part in [user for user in backward.users if user.target is operator.getitem]:
        gradient = emit(operator.getitem, new, part.args[1])
        if part.args[1] != 2:
            gradient = _signal(emit, gradient, value_of(part))
        part.replace_all_uses_with(gradient)
