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
    ADDITIVE,
    BOUNDED_BY,
    CASTS,
    GENTLE,
    MULTIPLES,
    PERIODIC,
    POWERS,
    SCALED,
    SUMS_OF_TWO,
    VIEWS,
    multiplier,
)
from hot_compile.passes.base.ranges import range_of
from hot_compile.passes.base.site import hint

_FACTORS = MULTIPLES | SCALED | BOUNDED_BY | {aten.where.self}
"""What may be done to a value and another tensor."""
_GENTLE_FROM_ONE = {
    aten.reciprocal.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.log.default,
}
_NOT_POSITIVE = {(aten.gt.Scalar, 2), (aten.le.Scalar, 1)}
"""Comparisons with nothing, and the branch that is taken of what does not exceed it."""
_FAST, _FASTEST = 8, 64
"""Times a value may be multiplied by constants to be an angle: above the one a sine is steep, above
the other even 12 bits leave an angle that says nothing."""


@dataclasses.dataclass(frozen=True)
class _Link:
    """A node of the chain."""

    place: tuple[Any, ...] = ()
    """How its elements were moved: two nodes are functions of the same elements if these agree."""
    linear: bool = True
    """A multiple of the saved tensor."""
    steep: bool = False
    """A small error may have become a large one."""
    turns: bool = False
    """It is made of a sine: errors count beside a turn, not beside the value."""
    gain: float = 1.0
    """What constants have multiplied it by, before it was saved and since, at most."""


class Chain:
    """Nodes recomputed from a root by operators of which each element depends on one of the root.

    ``plain``: readers see multiples of the root only. ``steep``: some see a steep function of it.
    ``turns``: some see a sine of it.
    """

    def __init__(self, root: fx.Node, made: fx.Node) -> None:
        """``made``: the same in the forward."""
        self._links = {root: _Link(gain=_gain(made))}
        self.plain, self.steep, self.turns = True, False, False

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
        place = links[0].place
        if len({link.place for link in links}) > 1:
            if user.target not in _FACTORS:
                return "combined with itself in other places"
            place = (user,)
        if others and user.target not in _FACTORS | SUMS_OF_TWO:
            return f"a function of it and of another tensor ({user.target})"
        gain = max(link.gain for link in links)
        steep = user.target in POWERS and not _is_bounded_power(user)
        turning = user.target in PERIODIC and gain <= _FASTEST
        if not (steep or turning or is_gentle(user, inside)):
            return f"steep, or not known not to be ({user.target})"
        linear = all(link.linear for link in links) and _is_multiple(user, inside)
        steep |= any(link.steep for link in links) or (turning and gain > _FAST)
        turns = turning or any(link.turns for link in links)
        self._links[user] = _Link(place, linear, steep, turns, gain * abs(multiplier(user) or 1.0))
        return ""

    def affine(self, node: fx.Node, user: fx.Node) -> None:
        """``user`` adds a vector by channel, which storing by channel is indifferent to."""
        self._links[user] = self._links[node]

    def end(self, node: fx.Node) -> None:
        """A reader outside the chain is linear in ``node``."""
        self.plain &= self._links[node].linear
        self.steep |= self._links[node].steep
        self.turns |= self._links[node].turns


def is_gentle(node: fx.Node, inside: list[fx.Node]) -> bool:
    """A small change of its operands ``inside`` changes a pointwise node, and its slope, little."""
    target, given = node.target, node.args[0]
    if target is aten.pow.Tensor_Scalar:
        return node.args[1] in (1, 2, 3)
    if target is aten.div.Tensor and node.args[1] in inside:
        return is_at_least_one(node.args[1])
    if target in _GENTLE_FROM_ONE:
        return is_at_least_one(given)
    if target is aten.log1p.default:
        return range_of(given)[0] >= 0
    return target in GENTLE or _is_bounded_power(node)


def is_at_least_one(divisor: Any) -> bool:
    """No slope of what is divided by it is above that of what is divided."""
    return range_of(divisor)[0] >= 1


def _is_bounded_power(node: fx.Node) -> bool:
    """e to something: a softmax's, less its largest; to what is never positive, or not taken where
    it is; a sigmoid's or softplus', which one is added to."""
    given = node.args[0] if node.target in POWERS else None
    if not isinstance(given, fx.Node):
        return False
    if given.target is aten.sub.Tensor and isinstance(given.args[1], fx.Node):
        return strip(given.args[1], VIEWS).target is aten.amax.default
    if range_of(given)[1] <= 0:
        return True
    return all(_levels(user, node) or _not_taken(user, node, given) for user in node.users)


def _levels(user: fx.Node, power: fx.Node) -> bool:
    """``user`` adds one to a power of e, or is divided by one more than it."""
    if user.target in MULTIPLES:
        return all(u.target is aten.div.Tensor and _adds_one(u.args[1], power) for u in user.users)
    return _adds_one(user, power) or user.target is aten.log1p.default


def _not_taken(user: fx.Node, node: fx.Node, given: fx.Node) -> bool:
    """What ``user`` makes of ``node`` is chosen only where ``given`` is not positive."""
    if user.target in SCALED | MULTIPLES:
        return all(_not_taken(u, user, given) for u in user.users)
    if user.target is not aten.where.self or not isinstance(user.args[0], fx.Node):
        return False
    compared, branch = user.args[0], user.args.index(node)
    of_it = compared.args[:1] == (given,) and compared.args[1:] == (0,)
    return of_it and (compared.target, branch) in _NOT_POSITIVE


def _adds_one(node: Any, power: fx.Node) -> bool:
    if getattr(node, "target", None) not in ADDITIVE or node.args[0] is not power:
        return False
    return bool(node.args[1] == 1)


def _gain(node: Any) -> float:
    """What constants have multiplied ``node`` by."""
    gain = 1.0
    while isinstance(node, fx.Node):
        factor = multiplier(node)
        if factor is None and node.target not in VIEWS | CASTS:
            break
        gain *= abs(factor or 1.0)
        node = node.args[0]
    return gain


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return tuple(map(hint, one.shape)) == tuple(map(hint, other.shape))


def _is_multiple(user: fx.Node, inside: list[fx.Node]) -> bool:
    if user.target in MULTIPLES:
        return len(inside) == 1 and user.args.count(inside[0]) <= 1
    return user.target is aten.div.Tensor and len(inside) == 1 and user.args[0] is inside[0]
