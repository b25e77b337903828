"""What the backward recomputes from one saved tensor, operator by operator, as a function of it."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from hot_compile.passes.graph import CHANNEL_DIM, VIEWS, aten, is_pointwise
from hot_compile.passes.site import hint
from hot_compile.passes.storage import probe
from hot_compile.passes.storage.schemes import Scheme, Unit

_FACTORS = {aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.where.self}
"""What may still be done to a value that another tensor multiplies."""
_JUMPS = {getattr(aten, name).default for name in ("floor", "ceil", "round", "trunc", "frac")} | {
    aten.remainder.Scalar,
    aten.fmod.Scalar,
    aten.round.decimals,
}
"""They turn the smallest error into a whole step."""
_ROOT_STEPS = 16


@dataclasses.dataclass(frozen=True)
class _Link:
    """A node of the chain."""

    place: tuple[Any, ...]
    """How its elements were moved: two nodes are functions of the same elements if these agree."""
    linear: bool = True
    """A multiple of the saved tensor."""
    scaled: bool = False
    """Multiplied by another tensor, or a vector of parameters added."""


class Chain:
    """Nodes recomputed from a root by operators of which each element depends on one of the root.

    ``try_scheme`` evaluates them on samples.
    """

    def __init__(self, root: fx.Node) -> None:
        self._root = root
        self._links = {root: _Link(())}
        self._order: list[fx.Node] = []
        self._masks: set[fx.Node] = set()
        self._ends: dict[tuple[fx.Node, bool], None] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._links

    def move(self, node: fx.Node, user: fx.Node) -> None:
        """``user`` places, views or casts what ``node`` holds."""
        link = self._links[node]
        changed = user.meta.get("val"), node.meta.get("val")
        moved = user.target in VIEWS or not _same_elements(*changed)
        step = (user.target, str(user.args[1:]), str(user.kwargs)) if moved else ()
        place = (*link.place, step) if moved else link.place
        known = self._links.get(user)
        if known is not None and known.place != place:  # a cat of two parts
            place = (*place, user)
        self._add(user, dataclasses.replace(link, place=place))

    def compare(self, user: fx.Node) -> None:
        """``user`` is a mask, carried without loss."""
        self._masks.add(user)
        self._order.append(user)

    def step(self, user: fx.Node, scaled: bool) -> str:
        """``user`` computes from nodes of the chain, constants and, if ``scaled``, another tensor.

        Returns why that cannot be followed, '' if it can.
        """
        links = [self._links[n] for n in user.all_input_nodes if n in self._links]
        if user.target in _JUMPS:
            return f"rounded to whole steps ({user.target})"
        if len({link.place for link in links}) > 1:
            return "combined with itself in other places"
        factors = user.target in _FACTORS
        sums = user.target in (aten.add.Tensor, aten.sub.Tensor)
        already = any(link.scaled for link in links)
        if (scaled and not factors and not sums) or (already and not factors and not scaled):
            return f"a function of it and of another tensor ({user.target})"
        linear = all(link.linear for link in links) and _is_multiple(user, self)
        self._add(user, _Link(links[0].place, linear, scaled or already))
        return ""

    def affine(self, node: fx.Node, user: fx.Node) -> None:
        """``user`` adds a vector by channel, which storing by channel is indifferent to."""
        self._add(user, self._links[node])

    def by_channel(self, node: fx.Node) -> bool:
        """``node``'s channels are the root's."""
        mine, root = node.meta["val"].shape, self._root.meta["val"].shape
        return tuple(map(hint, mine)) == tuple(map(hint, root)) and len(root) > CHANNEL_DIM

    def end(self, node: fx.Node, inverse: bool = False) -> str:
        """A reader outside the chain is linear in ``node``, or in its ``inverse``."""
        if inverse and self._links[node].scaled:
            return "divided by: its smallest values matter most"
        self._ends[node, inverse] = None
        return ""

    def _add(self, user: fx.Node, link: _Link) -> None:
        if user not in self._links:
            self._order.append(user)
        self._links[user] = link

    @property
    def plain(self) -> bool:
        """Readers see multiples of the saved tensor only."""
        return all(self._links[node].linear and not inverse for node, inverse in self._ends)

    def try_scheme(self, scheme: Scheme, made: fx.Node) -> str:
        """Why what is recomputed does not tolerate ``scheme``, '' if it does.

        Args:
            scheme: how the root would be stored.
            made: the forward's node of the root: what it was computed by tells what values it has.
        """
        if self.plain:
            return ""
        with _disable_current_modes(), torch.no_grad():
            try:
                return self._try(scheme, made)
            except Exception as error:  # an operator that our samples do not suit
                return f"could not be tried on samples: {error}"[:200]

    def _try(self, scheme: Scheme, made: fx.Node) -> str:
        x = _typical_values(made)
        if scheme.spec.unit is Unit.CENTRED_ROW and not self._is_homogeneous(x):
            return "bends near zero, where codes around another mean are coarse"
        values = self._evaluated(x, probe.restored(x, scheme))
        limit = probe.CENTRED if scheme.spec.unit is Unit.CHANNEL else probe.USUAL
        limit = probe.FOUR_BITS if scheme is Scheme.INT4 else limit
        for node, inverse in self._ends:
            exact, rounded = values[node]
            if inverse:
                exact, rounded = exact.reciprocal(), rounded.reciprocal()
            for within in (None, *self._regions(values)):
                problem = probe.verdict(exact, rounded, x, limit, within)
                if problem:
                    return problem
        return ""

    def _evaluated(self, x: Tensor, other: Tensor) -> dict[fx.Node, tuple[Tensor, Tensor]]:
        """All nodes of the chain at ``x`` and at ``other``, masks as they are at ``x``."""
        values = {self._root: (x, other)}
        for node in self._order:
            values[node] = self._evaluate(node, values)
        return values

    def _is_homogeneous(self, x: Tensor) -> bool:
        """Twice the argument gives twice the result, or the same, as of a ReLU and its slope.

        Such a function has no scale of its own: it bends no finer than its values are spread.
        """
        values = self._evaluated(x, 2 * x)
        pairs = [values[node] for node, _ in self._ends]
        fine = [(one.isfinite() & two.isfinite(), one, two) for one, two in pairs]
        return all(
            torch.allclose(two[ok], 2 * one[ok], 1e-2) or torch.allclose(two[ok], one[ok], 1e-2)
            for ok, one, two in fine
        )

    def _regions(self, values: dict[fx.Node, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Where each mask holds, and where not, and what two have in common: a gradient may be let
        through there alone (a clamp's is, between two comparisons)."""
        masks = [values[mask][0] for mask in self._masks]
        sides = [(mask, ~mask) for mask in masks]
        both = [a & b for one, other in combinations(sides, 2) for a in one for b in other]
        return [side for pair in sides for side in pair] + both

    def _evaluate(
        self, node: fx.Node, values: dict[fx.Node, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        inside = [n for n in node.all_input_nodes if n in values]
        if _only_moves(node, inside):
            (source,) = inside[:1]
            return tuple(_as_type(v, node) for v in values[source])  # type: ignore[return-value]
        results = []
        for side in (0, 1):
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs),
                lambda n: _argument(n, node, values, side),  # noqa: B023
            )
            results.append(node.target(*args, **kwargs))  # type: ignore[operator]
        if node in self._masks:
            results[1] = results[0]
        return results[0], results[1]


def _argument(n: fx.Node, node: fx.Node, values: dict, side: int) -> Any:
    if n in values:
        return values[n][side]
    value = n.meta.get("val")
    if n.target is aten.full.default:
        return torch.full((), n.args[1], dtype=value.dtype, device="cpu")  # type: ignore[union-attr,arg-type]
    if not isinstance(value, Tensor):
        return hint(value)
    if value.dtype is torch.bool:
        return _coin(next(iter(values.values()))[0])
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.where.self):
        return torch.zeros((), dtype=value.dtype, device="cpu")
    return torch.ones((), dtype=value.dtype, device="cpu")


def _coin(like: Tensor) -> Tensor:
    return (torch.arange(like.numel(), device="cpu") % 3 > 0).view(like.shape)


def _only_moves(node: fx.Node, inside: list[fx.Node]) -> bool:
    return not is_pointwise(node) or bool(inside and _cast_only(node))


def _cast_only(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def _as_type(value: Tensor, node: fx.Node) -> Tensor:
    result = node.meta.get("val")
    dtype = result.dtype if isinstance(result, Tensor) else value.dtype
    return value.to(dtype)


def _same_elements(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and tuple(map(hint, a.shape)) == tuple(map(hint, b.shape))


def _is_multiple(user: fx.Node, chain: Chain) -> bool:
    inside = [n for n in user.all_input_nodes if n in chain]
    if user.target in (aten.mul.Tensor, aten.neg.default):
        return len(inside) == 1 and user.args.count(inside[0]) <= 1
    return user.target is aten.div.Tensor and len(inside) == 1 and user.args[0] is inside[0]


def _typical_values(made: fx.Node) -> Tensor:
    """Samples of the tensor: of what it is a function of, through that function."""
    path: list[fx.Node] = []
    node = made
    while len(path) < _ROOT_STEPS and _is_unary(node):
        path.append(node)
        (node,) = node.all_input_nodes
    root = node.meta["val"]
    dtype = root.dtype if isinstance(root, Tensor) and root.is_floating_point() else torch.float32
    value = probe.samples(dtype)
    for step in reversed(path):
        args, kwargs = fx.map_arg((step.args, step.kwargs), lambda _: value)  # noqa: B023
        value = step.target(*args, **kwargs)  # type: ignore[operator]
    return value.to(made.meta["val"].dtype)


def _is_unary(node: fx.Node) -> bool:
    """A pointwise function of one floating-point tensor."""
    pointwise = is_pointwise(node)
    if node.op != "call_function" or not pointwise or len(node.all_input_nodes) != 1:
        return False
    value = node.all_input_nodes[0].meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
