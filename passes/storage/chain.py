"""What the backward recomputes from one saved tensor, operator by operator, as a function of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from hot_compile.passes.base.graph import CHANNEL_DIM, aten
from hot_compile.passes.base.operators import JUMPS, SCALED_BY_TENSOR, VIEWS
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import hint
from hot_compile.passes.storage import trial

_FACTORS = SCALED_BY_TENSOR | {aten.neg.default, aten.where.self}
"""What may still be done to a value that another tensor multiplies."""


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
        if user.target in JUMPS:
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
                nodes = (self._root, *self._order)
                return trial.problem(
                    trial.function_of(made, nodes, self._masks, self._ends), scheme
                )
            except Exception as error:  # an operator that our samples do not suit
                return f"could not be tried on samples: {error}"[:200]


def _same_elements(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and tuple(map(hint, a.shape)) == tuple(map(hint, b.shape))


def _is_multiple(user: fx.Node, chain: Chain) -> bool:
    inside = [n for n in user.all_input_nodes if n in chain]
    if user.target in (aten.mul.Tensor, aten.neg.default):
        return len(inside) == 1 and user.args.count(inside[0]) <= 1
    return user.target is aten.div.Tensor and len(inside) == 1 and user.args[0] is inside[0]
