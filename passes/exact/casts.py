"""Casts of weights and of their gradients, and batch norms' counts of steps, made by one launch for
a group of them.

Under autocast a step casts every weight and every bias, and a backward that keeps no casts from the
forward (they would take two bytes a parameter) makes them again. As kernels of their own they are a
fifth of GPT-2's launches on a GPU, which runs each for a microsecond while the host takes ten. An
EfficientNet-B0's 81 convolutions and 49 counts are an eighth of its, and a tenth the casts of what
libraries give for its weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, is_ours, strip, value_of
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    VIEWS,
)
from hot_compile.passes.base.site import bytes_of
from hot_compile.runtime import casts

CAST = torch.ops.prims.convert_element_type.default
_LIBRARIES = MATRIX_PRODUCTS.keys() | BATCHED_PRODUCTS | CONVOLUTIONS
GROUP_BYTES = 2**25
"""Most bytes of a group: what is cast before its turn takes memory until it comes, and so does a
gradient that waits for others."""
_SHORT_BYTES = 2**22
"""Of a gradient whose cast takes a GPU no longer than its launch takes the host."""


def cast_together(graph: fx.Graph) -> int:
    """Group the casts of ``graph``'s inputs, and of its small results, in place; returns how many
    are in groups.

    Those of inputs are where the first was, those of results where the last was.
    """
    count = 0
    for group in list(cast_groups(graph)):
        casts.lowered()
        place = group[0] if _of_an_input(group[0]) else group[-1]
        emit = Emitter(graph, place, place)
        sources = [node.args[0] for node in group]
        made = emit(torch.ops.hot.cast_together.default, sources, group[0].args[1])
        for node, part in zip(group, emit.parts(made), strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
        count += len(group)
    return count


def count_together(graph: fx.Graph) -> int:
    """The same of numbers that a step adds one to, each a tensor of its own: how many there are."""
    found = count_groups(graph)
    for group in found:
        casts.lowered()  # lists are scheduled
        emit = Emitter(graph, group[0], group[0])
        made = emit(aten._foreach_add.Scalar, [node.args[0] for node in group], 1)
        for node, part in zip(group, emit.parts(made), strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    return sum(map(len, found))


def count_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Two or more such additions each, on one device."""
    adds = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    groups: dict[torch.device, list[fx.Node]] = {}
    for node in filter(_counts, adds):
        groups.setdefault(value_of(node).device, []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _counts(node: fx.Node) -> bool:
    source, *others = node.args
    if not isinstance(source, fx.Node) or source.op != "placeholder" or others != [1]:
        return False
    value = value_of(node)
    whole = value.dtype is torch.int64 and value.dim() == 0 and not node.kwargs
    return whole and value.device.type == "cuda"


def cast_groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Two or more casts each, alike in device and both dtypes, in the order of the graph."""
    open_: dict[object, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=CAST):
        result = _of_a_result(node)
        if not (result or (_of_an_input(node) and _read_from_memory(node))):
            continue
        source = value_of(node.args[0])
        kind = (source.device, source.dtype, node.args[1], result)
        group = open_.setdefault(kind, [])
        if group and _bytes([*group, node]) > GROUP_BYTES:
            yield from _worth_it(group)
            group = open_[kind] = []
        group.append(node)
    for group in open_.values():
        yield from _worth_it(group)


def _worth_it(group: list[fx.Node]) -> Iterator[list[fx.Node]]:
    if len(group) > 1:
        yield group


def _bytes(group: list[fx.Node]) -> int:
    return sum(bytes_of(value_of(node)) for node in group)


def _of_an_input(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.op == "placeholder" and _lies_flat(source)


def _of_a_result(node: fx.Node) -> bool:
    """A library made it, and the caller gets the cast and nothing else does: a small gradient."""
    if any(user.op != "output" for user in node.users) or not isinstance(node.args[0], fx.Node):
        return False
    made = strip(node.args[0], VIEWS)
    made = made.args[0] if made.target is operator.getitem else made  # type: ignore[assignment]
    flat = made.target in _LIBRARIES and _lies_flat(node.args[0])
    return flat and bytes_of(value_of(node)) <= _SHORT_BYTES


def _lies_flat(source: fx.Node) -> bool:
    value = source.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and value.is_floating_point()
        and value.dim() > 0
        and all(isinstance(size, int) for size in value.shape)
        and value.is_contiguous()
        and lies_as_any(value)
    )


def lies_as_any(value: torch.Tensor) -> bool:
    """Channels last or not, it lies in the same order: any other kernel of a convolution is laid
    out anew where it is cast, which in one launch with others was not tried."""
    _, *inner = value.shape
    return len(inner) <= 1 or inner[0] == 1 or all(size == 1 for size in inner[1:])


def _read_from_memory(node: fx.Node) -> bool:
    """Libraries read it, not kernels of Inductor's, which cast what they read at no cost."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target in VIEWS:
                stack.append(user)
            elif not (user.op == "output" or user.target in _LIBRARIES or is_ours(user)):
                return False
    return True
