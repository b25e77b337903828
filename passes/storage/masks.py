"""Comparisons that the backward makes on what it recomputes from a saved tensor.

A rounded value may fall on the other side of what it is compared with. So a mask is made in the
forward, of what is not rounded, and kept as bits. Where nothing is made of it but one other mask,
as of both ends of a clamp, that is kept in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, makes_bool, walk
from hot_compile.passes.base.site import hint

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

    @property
    def parts(self) -> set[fx.Node]:
        """The masks of the backward that it is made of; itself is one of them."""
        return _parts(self.node)


def mask_of(node: fx.Node, forward: Mapping[str, fx.Node]) -> Mask:
    """A mask of the backward that :func:`kept_for` gave. ``forward``: its nodes, by name."""
    compared = compared_in(node)
    assert compared is not None
    operands = tuple((n, forward[n.name]) for n in _operands(node))
    return Mask(node, forward[compared.name], operands)


def kept_for(comparison: fx.Node, computed: Set[str] | None) -> fx.Node | None:
    """What is to be kept in the place of a comparison: itself, or what is made of it and of others.

    None if the forward cannot make it. ``computed``: names of the forward's values; None: all.
    """
    if not _can_be_made(comparison, computed):
        return None
    node = comparison
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _OF_MASKS or not _can_be_made(user, computed):
            break
        node = user
    return node


def compared_in(mask: fx.Node) -> fx.Node | None:
    """The first value that a mask is made of, and that is as large; None if there is none."""
    return next((n for n in _operands(mask) if _sizes(n) == _sizes(mask)), None)


def _can_be_made(mask: fx.Node, computed: Set[str] | None) -> bool:
    plain = all(set(part.all_input_nodes) <= set(part.args) for part in _parts(mask))
    known = computed is None or {n.name for n in _operands(mask)} <= computed
    return plain and known and compared_in(mask) is not None


def _parts(mask: fx.Node) -> set[fx.Node]:
    return walk(
        [mask], lambda n: filter(_is_part, n.all_input_nodes if n.target in _OF_MASKS else ())
    )


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_function" and makes_bool(node)


def _operands(mask: fx.Node) -> list[fx.Node]:
    parts = _parts(mask)
    return list(
        dict.fromkeys(n for p in sorted(parts) for n in p.all_input_nodes if n not in parts)
    )


def _sizes(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(map(hint, value.shape)) if isinstance(value, torch.Tensor) else None
