"""Backward graph -> the same with affine maps by channel of restored images in one step.

A batch norm's output is recomputed as ((x - mean) * rstd) * weight + bias. With the scale of the
stored x, five vectors by channel are then read for every element, and a kernel that moves three
bytes an element is bound by that: 66 us for images of a ResNet-50 whose bytes take 36 (H200). As
x * a + b, with a and b worked out once a channel, there are three.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.emit import Emitter
from hot_compile.passes.graph import CHANNEL_DIM, IMAGE_DIMS, aten

_STEPS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}
_FEWEST = 3
"""Steps worth two vectors and a kernel that makes them."""


def fold_channel_steps(image: fx.Node) -> int:
    """Fold, in place, every chain of steps by channel that begins at ``image``, a restored tensor.

    Returns how many were folded.
    """
    value = image.meta["val"]
    channels = value.shape[CHANNEL_DIM] if value.dim() == IMAGE_DIMS else None
    if not isinstance(channels, int):
        return 0
    done = 0
    for user in list(image.users):
        steps = list(_chain(image, user, channels))
        if len(steps) >= _FEWEST:
            _fold(image, steps)
            done += 1
    return done


def _chain(image: fx.Node, step: fx.Node, channels: int) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(step, its vector), each step the only reader of the one before, all in fp32."""
    before = image
    while True:
        vector = _vector(step, before, channels)
        if vector is None:
            return
        yield step, vector
        if len(step.users) != 1:
            return
        before, step = step, next(iter(step.users))


def _vector(step: fx.Node, before: fx.Node, channels: int) -> fx.Node | None:
    """What ``step`` adds to ``before``, takes from it or multiplies it by, if it is by channel."""
    if step.target not in _STEPS or len(step.args) != 2 or step.kwargs:
        return None
    left, right = step.args
    if right is before and step.target is not aten.sub.Tensor:
        left, right = right, left
    if left is not before or not isinstance(right, fx.Node) or right is before:
        return None
    fp32 = all(n.meta["val"].dtype is torch.float32 for n in (step, right))
    sizes = (1,) * IMAGE_DIMS + tuple(right.meta["val"].shape)
    return right if fp32 and sizes[-IMAGE_DIMS:] == (1, channels, 1, 1) else None


def _fold(image: fx.Node, steps: list[tuple[fx.Node, fx.Node]]) -> None:
    end = steps[-1][0]
    emit = Emitter(end.graph, end, end)
    factor: fx.Node | None = None
    offset: fx.Node | None = None
    for step, vector in steps:
        if step.target is aten.mul.Tensor:
            factor = vector if factor is None else emit(aten.mul.Tensor, factor, vector)
            offset = offset and emit(aten.mul.Tensor, offset, vector)
        elif offset is None:
            offset = vector if step.target is aten.add.Tensor else emit(aten.neg.default, vector)
        else:
            offset = emit(step.target, offset, vector)
    result = emit.cast(image, torch.float32)
    if factor is not None:
        result = emit(aten.mul.Tensor, result, emit.from_memory(factor))
    if offset is not None:
        result = emit(aten.add.Tensor, result, emit.from_memory(offset))
    end.replace_all_uses_with(result)
