"""What the backward recomputes from one saved tensor, operator by operator, as a function of it.

How far its values may be rounded is read off the operators alone. What that gets wrong for the
data at hand is seen, and repaired, by comparison with exact gradients (docs/acceptance.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, fx

from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.base.operators import (
    BOUNDED_BY,
    GENTLE,
    MULTIPLES,
    SCALED,
    SUMS_OF_TWO,
    VIEWS,
)
from hot_compile.passes.base.site import hint

_FACTORS = MULTIPLES | SCALED | BOUNDED_BY | {aten.where.self}
"""What may be done to a value and another tensor."""
_STEEP = {aten.exp.default, aten.expm1.default}


@dataclasses.dataclass(frozen=True)
class _Link:
    """A node of the chain."""

    place: tuple[Any, ...] = ()
    """How its elements were moved: two nodes are functions of the same elements if these agree."""
    linear: bool = True
    """A multiple of the saved tensor."""
    steep: bool = False
    """A small error may have become a large one."""


class Chain:
    """Nodes recomputed from a root by operators of which each element depends on one of the root.

    ``plain``: readers see multiples of the root only. ``steep``: some see a steep function of it.
    """

    def __init__(self, root: fx.Node) -> None:
        self._links = {root: _Link()}
        self.plain, self.steep = True, False

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._links

    def move(self, node: fx.Node, user: fx.Node) -> None:
        """``user`` places, views or casts what ``node`` holds."""
        link = self._links[node]
        moved = user.target in VIEWS or not _same_shape(user, node)
        step = (user.target, str(user.args[1:]), str(user.kwargs))
        place = (*link.place, step) if moved else link.place
        known = self._links.get(user)
        if known is not None and known.place != place:  # a cat of two parts
            place = (*place, user)
        self._links[user] = dataclasses.replace(link, place=place)

    def step(self, user: fx.Node, others: bool) -> str:
        """``user`` computes from nodes of the chain, constants and, with ``others``, other tensors.

        Returns why that cannot be followed, '' if it can.
        """
        inside = [n for n in user.all_input_nodes if n in self._links]
        links = [self._links[n] for n in inside]
        if len({link.place for link in links}) > 1:
            return "combined with itself in other places"
        if others and user.target not in _FACTORS | SUMS_OF_TWO:
            return f"a function of it and of another tensor ({user.target})"
        steep = user.target in _STEEP and not _is_bounded_power(user)
        if not (steep or is_gentle(user, inside)):
            return f"steep, or not known not to be ({user.target})"
        linear = all(link.linear for link in links) and _is_multiple(user, inside)
        steep |= any(link.steep for link in links)
        self._links[user] = _Link(links[0].place, linear, steep)
        return ""

    def affine(self, node: fx.Node, user: fx.Node) -> None:
        """``user`` adds a vector by channel, which storing by channel is indifferent to."""
        self._links[user] = self._links[node]

    def end(self, node: fx.Node) -> None:
        """A reader outside the chain is linear in ``node``."""
        self.plain &= self._links[node].linear
        self.steep |= self._links[node].steep


def is_gentle(node: fx.Node, inside: list[fx.Node]) -> bool:
    """A small change of its operands ``inside`` changes a pointwise node, and its slope, little."""
    target = node.target
    if target is aten.pow.Tensor_Scalar:
        return node.args[1] in (1, 2, 3)
    if target is aten.div.Tensor and node.args[1] in inside:
        return _at_least_one(node.args[1])
    if target is aten.reciprocal.default:
        return _at_least_one(node.args[0])
    if target is aten.log1p.default:
        return getattr(node.args[0], "target", None) is aten.exp.default
    return target in GENTLE or _is_bounded_power(node)


def _is_bounded_power(node: fx.Node) -> bool:
    """e to something: a softmax's, less its largest; a sigmoid's or softplus', which one is added
    to; a bell's, e to a negative square."""
    given = node.args[0] if node.target is aten.exp.default else None
    if not isinstance(given, fx.Node):
        return False
    if given.target is aten.sub.Tensor and isinstance(given.args[1], fx.Node):
        return strip(given.args[1], VIEWS).target is aten.amax.default
    factor = given.args[1] if given.target in SCALED else None
    bell = isinstance(factor, (int, float)) and factor < 0 and _is_square(given.args[0])
    return bell or all(_adds_one(u) or u.target is aten.log1p.default for u in node.users)


def _is_square(node: Any) -> bool:
    if node.target is aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 2)


def _at_least_one(node: Any) -> bool:
    """One more than a power of e."""
    return _adds_one(node) and getattr(node.args[0], "target", None) is aten.exp.default


def _adds_one(node: Any) -> bool:
    return node.target in (aten.add.Tensor, aten.add.Scalar) and bool(node.args[1] == 1)


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return tuple(map(hint, one.shape)) == tuple(map(hint, other.shape))


def _is_multiple(user: fx.Node, inside: list[fx.Node]) -> bool:
    if user.target in MULTIPLES:
        return len(inside) == 1 and user.args.count(inside[0]) <= 1
    return user.target is aten.div.Tensor and len(inside) == 1 and user.args[0] is inside[0]
