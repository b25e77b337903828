"""Which layers feed a difference of two uses of one weight: finite differences of one network.

In ``f(x + h) - 2 f(x) + f(x - h)`` the uses of a weight contribute almost the same to its gradient,
with opposite signs: what is left may be less than what rounding each of them changes. So all that
such a difference is made of stays exact, layers and stored tensors. Two uses count if neither comes
after the other: a layer applied again and again, as in a recurrent net, is no difference. Uses are
also the parts of one batch (dimension 0), as ``f(cat(x + h, x))`` in two halves has them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch import fx

from hot_compile.passes.base.graph import aten, is_ours, made_of, made_of_tangents, strip
from hot_compile.passes.base.operators import (
    CASTS,
    PARTS,
    SCALED_BY_TENSOR,
    SPLITS,
    SUMS_OF_TWO,
    VIEWS,
)
from hot_compile.passes.base.site import Site

DIFFERENCED = "feeds a difference of two uses of one weight: what is left may be less than errors"
_SCALED = VIEWS | CASTS | SCALED_BY_TENSOR | {aten.neg.default}


def differenced(graph: fx.Graph, sites: Iterable[Site]) -> set[fx.Node]:
    """Nodes of the joint graph's forward that such differences are made of.

    Args:
        graph: the joint graph. sites: its layers; those without a gradient are none.
    """
    products = {site.nodes.forward: site.nodes.weight for site in sites if site.nodes}
    backward = made_of_tangents(graph)
    forward = [node for node in graph.nodes if node not in backward]
    uses = _Uses(products)
    found: set[fx.Node] = set()
    results: set[fx.Node] = set()
    for node in forward:
        uses.see(node)
        if node.target in _SCALED and set(node.all_input_nodes) & results:
            results.add(node)
        if _subtracts(node, results) and uses.compete(*node.args[:2]):
            results.add(node)
            found |= made_of(node)
    return found


def _subtracts(node: fx.Node, differences: Set[fx.Node]) -> bool:
    """``node`` takes one tensor from another, or adds one to a difference."""
    if node.target not in SUMS_OF_TWO:
        return False
    operands = node.args[:2]
    if not all(isinstance(operand, fx.Node) for operand in operands):
        return False
    signs = [node.kwargs.get("alpha", 1), *map(_sign, operands)]
    negative = any(isinstance(sign, (int, float)) and sign < 0 for sign in signs)
    return node.target is aten.sub.Tensor or negative or bool(differences & set(operands))


def _sign(node: Any) -> Any:
    """A number that ``node`` is a multiple by, or 1."""
    if node.target is aten.neg.default:
        return -1
    return node.args[1] if node.target is aten.mul.Tensor else 1


def refuse(sites: Sequence[Site], nodes: Set[fx.Node]) -> list[Site]:
    """``sites``, those refused whose forward product is among ``nodes``."""
    return [
        dataclasses.replace(site, refusal=DIFFERENCED, nodes=None)
        if site.nodes and site.nodes.forward in nodes
        else site
        for site in sites
    ]


class _Uses:
    """Of every node the uses of weights that it comes after, as the bits of a number."""

    def __init__(self, products: dict[fx.Node, fx.Node]) -> None:
        self._weights = {node: strip(weight, VIEWS | CASTS) for node, weight in products.items()}
        self._after: dict[fx.Node, int] = {}
        self._groups: dict[fx.Node, int] = {}
        """Of a weight, or of what is cut in parts: the bits of its uses, or parts."""
        self._next = 1

    def see(self, node: fx.Node) -> None:
        """Take ``node`` in, after all that it reads."""
        bits = 0
        for operand in node.all_input_nodes:
            bits |= self._after.get(operand, 0)
        group = self._weights.get(node) or (_cut_from(node) if bits else None)
        if group is not None:
            self._groups[group] = self._groups.get(group, 0) | self._next
            bits |= self._next
            self._next <<= 1
        self._after[node] = bits

    def compete(self, one: fx.Node, other: fx.Node) -> bool:
        """Each comes after a use of one weight that the other does not come after."""
        mine, its = self._after.get(one, 0), self._after.get(other, 0)
        mine, its = mine & ~its, its & ~mine
        if not mine or not its:
            return False
        return any(mine & group and its & group for group in self._groups.values())


def _cut_from(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a part of, if it is cut along dimension 0."""
    cut, places = (node.args[0], SPLITS) if node.target is operator.getitem else (node, PARTS)
    if not isinstance(cut, fx.Node) or cut.target not in places:
        return None
    place = places[cut.target]
    dim = cut.args[place] if len(cut.args) > place else cut.kwargs.get("dim", 0)
    whole = cut.args[0]
    return whole if dim == 0 and isinstance(whole, fx.Node) and not _is_of_a_head(whole) else None


def _is_of_a_head(node: fx.Node) -> bool:
    """A head's statistics lie one behind the other: the loss's log-sum-exp less its logit."""
    maker = node.args[0] if node.target is operator.getitem else node
    return isinstance(maker, fx.Node) and is_ours(maker)
