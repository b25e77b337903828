"""Backward graph -> the same with affine maps by channel of restored images in one step.

A batch norm's output is recomputed as ((x - mean) * rstd) * weight + bias. With the scale and the
mean of the stored x, six vectors by channel are then read for every element, and a kernel that
moves three bytes an element is bound by that: 66 us for images of a ResNet-50 whose bytes take 36
(H200). As x * a + b, with a and b worked out once a channel, there are two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import CHANNEL_DIM, IMAGE_DIMS, aten, strip
from hot_compile.passes.base.operators import CASTS, IN_ORDER

_STEPS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}
_FEWEST = 3
"""Steps worth two vectors and a kernel that makes them, where none of them restores the image."""

Steps = tuple[tuple[fx.Node, fx.Node], ...]
"""(a step, its vector), each of the one before or of casts of it."""


def fold_channel_steps(
    image: fx.Node, saved: Mapping[fx.Node, fx.Node] | None = None
) -> list[fx.Node]:
    """Fold, in place, every chain of steps by channel that goes on from ``image``, a restored
    tensor, together with those that restore it.

    Args:
        saved: what the forward gives for placeholders of this backward.

    Returns the vectors, each as a kernel of its own would make it, that they were folded into.
    """
    value = image.meta["val"]
    channels = value.shape[CHANNEL_DIM] if value.dim() == IMAGE_DIMS else None
    if not isinstance(channels, int):
        return []
    start, restoring = _start(image, channels)
    fewest = len(restoring) + (1 if restoring else _FEWEST)
    found = [e for e in _ends(image, restoring, channels) if len(e[1]) >= fewest]
    folded = [_fold(start, end, steps, saved or {}) for end, steps in found]
    return [vector for vectors in folded for vector in vectors]


def _start(image: fx.Node, channels: int) -> tuple[fx.Node, Steps]:
    """What ``image`` is made of by steps and casts, and these steps."""
    node, steps = image, list[tuple[fx.Node, fx.Node]]()
    while True:
        before = strip(node, CASTS)
        vector = _vector(before, before.args[0], channels) if before.target in _STEPS else None
        if vector is None:
            return (before if steps else image), tuple(reversed(steps))
        steps.append((before, vector))
        node = before.args[0]  # type: ignore[assignment]


def _ends(node: fx.Node, steps: Steps, channels: int) -> Iterator[tuple[fx.Node, Steps]]:
    """Whatever else than a step or a cast reads, and the steps it takes to get there."""
    read = False
    for user in node.users:
        vector = _vector(user, node, channels)
        if vector is not None:
            yield from _ends(user, (*steps, (user, vector)), channels)
        elif user.target in CASTS and user.meta["val"].is_floating_point():
            yield from _ends(user, steps, channels)
        else:
            read = True
    if read:
        yield node, steps


def _vector(step: fx.Node, before: object, channels: int) -> fx.Node | None:
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


def _fold(
    start: fx.Node, end: fx.Node, steps: Steps, saved: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    emit = Emitter(end.graph, end, end)
    result, vectors = emit.cast(start, torch.float32), list[fx.Node]()
    for op, vector in zip(
        (aten.mul.Tensor, aten.add.Tensor), _map(emit, steps, saved), strict=True
    ):
        if vector is not None:
            vectors.append(emit.from_memory(vector))
            result = emit(op, result, vectors[-1])
    end.replace_all_uses_with(emit.cast(result, end.meta["val"].dtype))
    return vectors


def _map(
    emit: Emitter, steps: Sequence[tuple[fx.Node, fx.Node]], saved: Mapping[fx.Node, fx.Node]
) -> list[fx.Node | None]:
    """[factor, offset] that all ``steps`` are together; None for 1 and 0."""
    factor: fx.Node | None = None
    offset: fx.Node | None = None
    for step, vector in steps:
        if step.target is aten.mul.Tensor:
            factor = vector if factor is None else emit(aten.mul.Tensor, factor, vector)
            offset = offset and emit(aten.mul.Tensor, offset, vector)
        elif offset is None:
            offset = vector if step.target is aten.add.Tensor else emit(aten.neg.default, vector)
        elif step.target is aten.sub.Tensor and _made(offset, saved) is _made(vector, saved):
            offset = None  # the mean that was stored, and the norm's: one tensor
        else:
            offset = emit(step.target, offset, vector)
    return [factor, offset]


def _made(vector: fx.Node, saved: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What ``vector`` is another form of; one that was saved twice is one in the forward."""
    node = _same_values(vector)
    return _same_values(saved[node]) if node in saved else node


def _same_values(node: fx.Node) -> fx.Node:
    """``node`` followed back through views, and casts to the dtype that it has."""
    while True:
        before = strip(node, IN_ORDER)
        if before.target in CASTS and before.meta["val"].dtype is before.args[0].meta["val"].dtype:  # type: ignore[union-attr]
            before = before.args[0]  # type: ignore[assignment]
        if before is node:
            return node
        node = before
