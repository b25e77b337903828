"""Joint graph -> the same with convolutions of groups of channels by the kernels of gradients.

cuDNN may have no tensor-core kernel for such a forward, and has one for the gradient of its image:
of the convolution that tells positions apart in a Wav2Vec2 (16 groups of 48 channels, 128 taps, 132
signals of 99 places) the forward took 10.7 ms on an H200, the gradient 1.2. A convolution without
strides is the gradient of one whose weight has its channels exchanged and its taps reversed.
Values differ by rounding alone: the same terms are added in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from hot_compile.passes.base.emit import ForwardEmitter, prims
from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.site import elements_of
from hot_compile.passes.cost.images import GAIN, Kind, kind_of, seconds
from hot_compile.passes.layers.match_conv import each_dimension


def applies(conv: fx.Node) -> bool:
    """A forward of several channels a group and no strides."""
    *_, transposed, _, groups = conv.args
    weight = value_of(conv.args[1])
    if transposed or groups == 1 or weight.shape[1] == 1:
        return False
    kind = kind_of(conv, signals=True)
    if kind is None or any(n != 1 for n in kind.rest[0]):
        return False
    return min(_padding(kind)) >= 0


def saves(conv: fx.Node) -> float:
    """Seconds an element of what it reads, as timed, of the layout that wins less; 0: none."""
    kind, device = kind_of(conv, signals=True), value_of(conv).device
    assert kind is not None
    own, other = seconds(kind, device), seconds(_turned(kind), device)
    if own is None or other is None:
        return 0.0
    won = [a - b if b < GAIN * a else 0.0 for a, b in zip(own, other, strict=True)]
    return min(won) / max(1, elements_of(value_of(conv.args[0])))


def _padding(kind: Kind) -> list[int]:
    """Of the gradient whose kernel is used: what the other's leaves of a whole kernel."""
    return _left(kind.rest[1], kind.rest[2], kind.shapes[1][2:])


def _left(padding: Any, dilation: Any, lengths: Sequence[int]) -> list[int]:
    each = (each_dimension(setting, len(lengths)) for setting in (padding, dilation))
    return [d * (k - 1) - p for p, d, k in zip(*each, lengths, strict=True)]


def _turned(kind: Kind) -> Kind:
    (x, (outputs, channels, *lengths)), (*_, groups) = kind.shapes, kind.rest
    stride, _, dilation, _, output_padding, _ = kind.rest
    weight = channels * groups, outputs // groups, *lengths
    rest = stride, tuple(_padding(kind)), dilation, True, output_padding, groups
    return dataclasses.replace(kind, shapes=(x, weight), rest=rest)


def replace(graph: fx.Graph, conv: fx.Node) -> bool:
    """Give a convolution the form of a transposed one; its backward stays."""
    x, weight, bias, stride, padding, dilation, _, output_padding, groups = conv.args
    outputs, channels, *lengths = value_of(weight).shape
    many, dims = int(groups), len(lengths)  # type: ignore[arg-type]
    emit = ForwardEmitter(graph, conv, conv)
    kernel = emit(aten.reshape.default, weight, [many, outputs // many, channels, *lengths])
    kernel = emit.permute(kernel, [0, 2, 1, *range(3, 3 + dims)])
    kernel = emit(aten.reshape.default, kernel, [many * channels, outputs // many, *lengths])
    kernel = emit(prims.rev.default, kernel, list(range(2, 2 + dims)))
    rest = stride, _left(padding, dilation, lengths), dilation, True, output_padding, groups
    y = emit(aten.convolution.default, x, kernel, bias, *rest)
    emit.put_in_place(y)
    return True
