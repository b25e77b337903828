"""Takes back what was saved so that it may be stored, and then was not.

``advance`` saves a result beside what it is made of, for then both tolerate rounding, or a norm's,
in fp32, in place of the 16 bits that the norm reads. Where a step has not the time to store
them, they would stay as they are: the backward makes them again, as it was to, of what is kept, or
of what was kept before.
"""

from __future__ import annotations

import operator
from collections.abc import Set

from torch import fx

from hot_compile.passes.base.graph import placeholders, value_of
from hot_compile.passes.base.operators import CASTS, MOVES, SPLITS, VIEWS, is_pointwise
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.storage.crossers import saved_pairs
from hot_compile.passes.storage.cut import CutEditor
from hot_compile.passes.storage.put_back import give_back

_MOVES = VIEWS | MOVES | CASTS | SPLITS.keys()
_MOST = 9 / 8
"""Times its bytes that may be kept instead: a norm's input and what the norm took."""
_LONGEST = 24
"""Operators that make it of what is kept."""


def take_back(
    forward: fx.Graph,
    backward: fx.Graph,
    num_fwd_outputs: int,
    names: Set[str],
    stored: Set[fx.Node],
    before: Set[str],
) -> set[fx.Node]:
    """Both graphs change in place; returns which of the forward's nodes are saved no more.

    Args:
        names: of what was saved so that it may be stored.
        stored: what is not kept as it is.
        before: names of what was saved before that, and may be again.
    """
    pairs = dict(saved_pairs(forward, backward, num_fwd_outputs))
    exact = {saved: there for saved, there in pairs.items() if saved not in stored}
    arriving = {node.name: node for node in placeholders(backward)}
    for node in placeholders(forward):
        if node.name in arriving:
            exact[node] = arriving[node.name]
    lost = {node for node in forward.nodes if node.name in before and node not in pairs}
    cut, taken = CutEditor(forward, backward, num_fwd_outputs), set[fx.Node]()
    for saved in [node for node in exact if node.name in names and exact[node].users]:
        there = {node: kept for node, kept in exact.items() if node is not saved}
        chain = _chain(saved, there.keys() | lost)
        read = dict.fromkeys(n for node in chain for n in node.all_input_nodes)
        again = [node for node in read if node not in there and node not in chain]
        if not chain or sum(map(_bytes, again)) > _MOST * _bytes(saved):
            continue
        for node in again:
            there[node] = exact[node] = cut.keep(node, saved, exact[saved])
            give_back(backward, exact[node])
        lost -= set(again)
        cut.remake(exact.pop(saved), chain, there)
        taken.add(saved)
    cut.finish()
    return taken


def _bytes(node: fx.Node) -> int:
    return bytes_of(value_of(node))


def _chain(saved: fx.Node, there: Set[fx.Node]) -> list[fx.Node]:
    """What makes ``saved`` of ``there``, in order; empty if that takes more than a pass over it."""
    found, stack = dict[fx.Node, None](), [saved]
    while stack:
        node = stack.pop()
        if node in there or node in found:
            continue
        if not _is_cheap(node) or len(found) == _LONGEST:
            return []
        found[node] = None
        stack += node.all_input_nodes
    return sorted(found)


def _is_cheap(node: fx.Node) -> bool:
    moves = node.target is operator.getitem or node.target in _MOVES
    return node.op == "call_function" and (is_pointwise(node) or moves)
