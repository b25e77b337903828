"""Vectors of a backward -> the same, worked out in the forward where all that they are of is.

The factor by channel that a restored image and the batch norm behind it are folded into
(``affine.py``) is of a scale, a reciprocal of a deviation and a weight. In the backward it takes a
kernel of its own, for some hundred numbers; in the forward the kernel that makes the scale makes
it, too, and what is kept is four bytes a channel more.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, made_of
from hot_compile.passes.base.operators import CASTS, VIEWS

_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}
_STEPS = _ARITHMETIC | VIEWS | CASTS


def given_of(vector: fx.Node, given: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The backward's placeholders that ``vector`` is worked out of, in their order.

    Args:
        given: what the forward gives for the backward's placeholders.

    Empty if the forward cannot work it out, or if that takes no arithmetic.
    """
    nodes = made_of(vector)
    leaves = {node for node in nodes if node.op == "placeholder"}
    size = vector.meta["val"].numel()
    small = all(n.target in _STEPS and n.meta["val"].numel() <= size for n in nodes - leaves)
    worth = any(node.target in _ARITHMETIC for node in nodes)
    return sorted(leaves) if small and worth and leaves <= given.keys() else []


def in_forward(vector: fx.Node, given: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """``vector``, worked out in the forward right behind what it is of; None where ``given_of`` has
    nothing."""
    copies = {leaf: given[leaf] for leaf in given_of(vector, given)}
    if not copies:
        return None
    place = max(copies.values()).next
    while place.op == "placeholder":
        place = place.next
    emit = Emitter(place.graph, place, max(copies.values()))
    for node in sorted(made_of(vector) - copies.keys()):
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = emit(node.target, *args, **kwargs)
    return copies[vector]
