"""Comparisons that the backward makes on what it recomputes from a saved tensor.

A rounded value may fall on the other side of what it is compared with. So a mask is made in the
forward, of what is not rounded, and kept as bits. Where nothing is made of it but one other mask,
as of both ends of a clamp, that is kept in its place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, makes_bool, strip, walk
from hot_compile.passes.base.operators import (
    BATCHED_PRODUCTS,
    REDUCTIONS,
    VIEWS,
    is_layer_product,
)
from hot_compile.passes.base.site import hint

Forward: TypeAlias = Mapping[str, fx.Node]
"""A forward's nodes, by name."""
_EQUALITIES = {aten.eq.Tensor, aten.ne.Tensor}
_OF_MASKS = {
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_not.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_not.default,
}


@dataclasses.dataclass(frozen=True)
class Mask:
    """One that the forward makes."""

    node: fx.Node
    """In the backward."""
    compared: fx.Node
    """In the forward: a value that it is made of, as large as it is, before it was rounded."""
    operands: tuple[tuple[fx.Node, fx.Node], ...]
    """All values that it is made of: in the backward, and in the forward."""
    steps: tuple[tuple[fx.Node, Any, tuple[Any, ...]], ...]
    """How, in order: masks of the backward, the last one itself, their targets and arguments. Once
    one of them is kept by itself, the backward has other arguments."""

    @property
    def parts(self) -> set[fx.Node]:
        """The masks of the backward that it is made of; itself is one of them."""
        return {part for part, *_ in self.steps}


def mask_of(node: fx.Node, forward: Forward) -> Mask:
    """A mask of the backward that :func:`kept_for` gave."""
    compared = compared_in(node)
    assert compared is not None
    operands = tuple((n, forward[n.name]) for n in _operands(node))
    steps = tuple((part, part.target, part.args) for part in sorted(_parts(node)))
    return Mask(node, forward[compared.name], operands, steps)


def kept_for(comparison: fx.Node, forward: Forward | None) -> list[fx.Node]:
    """What is to be kept in the place of a comparison: itself, or what is made of it and of others.

    Nothing if the forward cannot make it, or may find other values equal. Of no ``forward`` that is
    not asked.
    """
    if not _can_be_made(comparison, forward):
        return []
    found, stack = dict[fx.Node, None](), [comparison]
    while stack:
        node = stack.pop()
        behind = [user for user in node.users if _goes_on(node, user, forward)]
        if behind and len(behind) == len(node.users):
            stack += behind
        else:
            found[node] = None
    return list(found)


def _goes_on(node: fx.Node, user: fx.Node, forward: Forward | None) -> bool:
    alike = user.target in _OF_MASKS and _sizes(user) == _sizes(node)
    return alike and _can_be_made(user, forward)


def compared_in(mask: fx.Node) -> fx.Node | None:
    """The first value that a mask is made of, and that is as large; None if there is none."""
    return next((n for n in _operands(mask) if _sizes(n) == _sizes(mask)), None)


def _can_be_made(mask: fx.Node, forward: Forward | None) -> bool:
    parts = _parts(mask)
    plain = all(set(part.all_input_nodes) <= set(part.args) for part in parts)
    if not plain or compared_in(mask) is None:
        return False
    if forward is None:
        return True
    known = all(n.name in forward for n in _operands(mask))
    return known and all(_finds_equal(part, forward) for part in parts)


def _finds_equal(part: fx.Node, forward: Forward) -> bool:
    """What is equal in one kernel is so in another: values that each of them may work out for
    itself, in other places rounded, and in more bits, are not."""
    tensors = [n for n in part.all_input_nodes if math.prod(_sizes(n) or ()) > 1]
    if part.target not in _EQUALITIES or len(tensors) < 2:
        return True
    return all(_is_in_memory(strip(forward[n.name], VIEWS)) for n in tensors)


def _is_in_memory(node: fx.Node) -> bool:
    products = is_layer_product(node) or node.target in BATCHED_PRODUCTS
    return node.op == "placeholder" or products or node.target in REDUCTIONS


def _parts(mask: fx.Node) -> set[fx.Node]:
    def made_of(node: fx.Node) -> list[fx.Node]:
        called = (n for n in node.all_input_nodes if n.op == "call_function")
        return list(filter(makes_bool, called)) if node.target in _OF_MASKS else []

    return walk([mask], made_of)


def _operands(mask: fx.Node) -> list[fx.Node]:
    parts = _parts(mask)
    read = dict.fromkeys(n for part in sorted(parts) for n in part.all_input_nodes)
    return [node for node in read if node not in parts]


def _sizes(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(map(hint, value.shape)) if isinstance(value, torch.Tensor) else None
