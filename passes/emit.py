"""Inserts operator nodes with the metadata that the partitioner and Inductor read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hot_compile.passes.graph import VIEWS, aten

prims = torch.ops.prims
_DESCRIBING = (
    "seq_nr",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "partitioner_tag",
    "autograd_backward",
)


def describe(like: fx.Node) -> dict[str, Any]:
    """Metadata for a node made in the place of ``like``, all but its value."""
    return {key: like.meta[key] for key in _DESCRIBING if key in like.meta}


class Emitter:
    """Appends nodes before one place of a graph, each with its fake value.

    Args:
        graph: changed in place.
        before: new nodes go right before this one, in the order they are made.
        like: whose origin the new nodes are given.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self._graph = graph
        self._before = before
        self._like = like

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node ``op(*args, **kwargs)``."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args, kwargs)
        node.meta = describe(self._like)
        node.meta["val"] = fake_result(node, fake_mode(self._like))
        return node

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """Length of ``node`` along ``dim``: a number, or a node where it is symbolic."""
        length = node.meta["val"].shape[dim]
        return length if isinstance(length, int) else self(aten.sym_size.int, node, dim)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` as ``dtype``."""
        if node.meta["val"].dtype == dtype:
            return node
        return self(prims.convert_element_type.default, node, dtype)

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """``node`` with its dimensions in this order."""
        if list(order) == list(range(len(order))):
            return node
        return self(aten.permute.default, node, list(order))

    def from_memory(self, vector: fx.Node) -> fx.Node:
        """``vector``, at most one dimension longer than 1, read from memory by whoever uses it.

        Inductor would else work it out again for every element that it is applied to, wherever it
        comes from another kernel. What is no more than a view of something lies in memory already.
        """
        if vector.op != "call_function" or vector.target in VIEWS:
            return vector
        fake = vector.meta["val"]
        return self(aten.as_strided.default, vector, list(fake.shape), list(fake.stride()))


def channels_first(call: Callable[..., fx.Node], new: fx.Node, like: torch.Tensor) -> fx.Node:
    """[B, *size, C] -> [B, C, *size] in the layout of ``like``, as the graph was traced with.

    ``call(op, *args, **kwargs)`` makes a node.
    """
    _, *size, channels = new.meta["val"].shape
    if all(n == 1 for n in size) and like.stride(-1) == 1:
        return call(aten.reshape.default, new, [-1, channels, *size])
    dims = like.dim()
    new = call(aten.permute.default, new, [0, dims - 1, *range(1, dims - 1)])
    if new.meta["val"].is_contiguous() or not like.is_contiguous():
        return new
    return call(aten.clone.default, new, memory_format=torch.contiguous_format)


def fake_mode(node: fx.Node) -> FakeTensorMode:
    """The mode that made ``node``'s fake value."""
    value = node.meta["val"]
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, FakeTensor):
            return part.fake_mode
    raise AssertionError(f"{node} has no fake tensor to take a mode from")


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What ``node`` computes from its arguments' fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def refresh(changed: Sequence[fx.Node]) -> None:
    """Recompute the fake values that depend on ``changed``, as far as shapes or strides differ.

    Nodes that cannot be recomputed (higher-order operators, unbacked sizes) keep what they have.
    """
    stale = {user for node in changed for user in node.users}
    while stale:
        node = min(stale)
        stale.discard(node)
        if node.op != "call_function" or "unbacked_bindings" in node.meta:
            continue
        with contextlib.suppress(Exception):
            value = fake_result(node, fake_mode(changed[0]))
            if not _same_layout(value, node.meta.get("val")):
                node.meta["val"] = value
                stale |= set(node.users)


def _same_layout(new: Any, old: Any) -> bool:
    if isinstance(new, (tuple, list)):
        return isinstance(old, (tuple, list)) and all(map(_same_layout, new, old))
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return True
    return new.shape == old.shape and new.stride() == old.stride()
