"""What all samples of a batch have in common at each position, apart from what tells them apart.

``g_w = sum g_b x_b``: if the x_b share a part and the g_b add up to almost nothing, what that part
leaves of the gradient is nothing, but what its rounding leaves is not. So the mean over the batch
is kept as it is, 1 / B of the bytes, and only the distance from it is coded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, walk
from hot_compile.passes.base.operators import IN_ORDER
from hot_compile.passes.base.site import hint

FEWEST = 4
"""Samples of a batch: of fewer the mean takes much of what it is to save."""
Sample = tuple[int, ...]
"""Sizes of what each sample has in a tensor whose first dimension is the batch once it is viewed as
[-1, *sizes]; () if it is so as it comes."""


def sample_of(saved: fx.Node, value: Tensor) -> Sample | None:
    """Where ``saved`` has its samples; None if that is not known, or there are too few.

    Rows of all samples side by side, [B * T, C], are told from samples by a view as [B, T, C] in
    front of or behind them, whose T must be known when it is compiled.

    Args:
        saved: a forward's node. value: fake, with the strides that it has in memory.
    """
    own = tuple(value.shape)
    if len(own) < 2 or not _is_dense(value):
        return None
    views = [tuple(n.meta["val"].shape) for n in _alike(saved)] if value.is_contiguous() else []
    first = min(filter(_has_batch, views), key=lambda s: hint(s[0]), default=own)
    if hint(first[0]) < hint(own[0]):
        return first[1:] if all(isinstance(n, int) for n in first[1:]) else None
    return () if _has_batch(own) else None


def mean_bytes(value: Tensor, sample: Sample) -> int:
    """Of the batch's mean, kept in ``value``'s dtype; sizes by hint."""
    return math.prod(map(hint, sample or value.shape[1:])) * value.dtype.itemsize


def less_batch_mean(emit: Emitter, x: fx.Node, sample: Sample) -> tuple[fx.Node, fx.Node]:
    """(distance from the batch's mean, fp32 and laid out as ``x``; the mean, in ``x``'s dtype).

    The mean has ``x``'s dimensions in the order of memory, or those of a sample, and one for the
    batch. Numbers that are not finite count as zero in it.
    """
    value = x.meta["val"]
    order = _in_memory(value)
    values = emit.cast(_by_sample(emit, emit.permute(x, order), sample), torch.float32)
    finite = emit(aten.lt.Scalar, emit(aten.abs.default, values), math.inf)
    counted = emit(aten.where.self, finite, values, emit.constant(0.0, like=values))
    mean = emit.cast(emit(aten.mean.dim, counted, [0]), value.dtype)
    rest = [emit.size(values, dim) for dim in range(1, values.meta["val"].dim())]
    mean = emit(aten.view.default, emit.from_memory(mean), [1, *rest])
    distance = emit(aten.sub.Tensor, values, emit.cast(mean, torch.float32))
    return _as_it_was(emit, distance, value, sample), mean


def plus_batch_mean(emit: Emitter, distance: fx.Node, mean: fx.Node, like: Tensor) -> fx.Node:
    """``distance``, fp32 and laid out as ``like``, around ``mean``; in ``like``'s dtype."""
    order = _in_memory(like)
    sizes = tuple(mean.meta["val"].shape[1:])
    sample = () if sizes == tuple(like.shape[d] for d in order[1:]) else sizes
    apart = _by_sample(emit, emit.permute(distance, order), sample)
    values = emit(aten.add.Tensor, apart, emit.cast(mean, torch.float32))
    return emit.cast(_as_it_was(emit, values, like, sample), like.dtype)


def _alike(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and what has its elements in the same order of memory."""

    def neighbours(n: fx.Node) -> Iterator[fx.Node]:
        yield from (user for user in n.users if user.target in IN_ORDER)
        if n.target in IN_ORDER:
            yield n.args[0]  # type: ignore[misc]

    return (n for n in walk([node], neighbours) if isinstance(n.meta.get("val"), Tensor))


def _has_batch(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and hint(shape[0]) >= FEWEST


def _is_dense(value: Tensor) -> bool:
    """Samples lie one after the other, and nothing in between."""
    run = 1
    for dim in reversed(_in_memory(value)):
        length = hint(value.shape[dim])
        if length > 1 and hint(value.stride(dim)) != run:
            return False
        run *= length
    return True


def _in_memory(value: Tensor) -> list[int]:
    """The dimensions, the batch first and the others as they lie in memory."""
    return [0, *sorted(range(1, value.dim()), key=lambda d: -hint(value.stride(d)))]


def _by_sample(emit: Emitter, memory: fx.Node, sample: Sample) -> fx.Node:
    return emit(aten.view.default, memory, [-1, *sample]) if sample else memory


def _as_it_was(emit: Emitter, values: fx.Node, like: Tensor, sample: Sample) -> fx.Node:
    order = _in_memory(like)
    if sample:
        values = emit(aten.view.default, values, [-1, *like.shape[1:]])
    return emit.permute(values, [order.index(dim) for dim in range(len(order))])
