"""A tensor of which a norm's result is saved: that, the deviation and the mean make it again.

What a norm of groups reads, a convolution beside it may read, too (a UNet's upward blocks). Stored
beside what the norm made of it, it would take as much again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import as_made, aten, made_of, strip, value_of
from hot_compile.passes.base.operators import CASTS, IN_ORDER
from hot_compile.passes.base.site import elements_of

_MARK = "hot_undoes_a_norm"
_FEW = 16
"""Times that what a norm takes must have fewer elements than what it is taken from."""
_MEANS = {aten.var_mean.correction, aten.mean.dim}


def steps_of_norm(there: fx.Node, saved: fx.Node, later: fx.Node) -> tuple[fx.Node, ...]:
    """(saved - its mean), and (that * one number a group), if ``there`` is that in the forward; as
    the backward has them, which makes it again as ``later``. () if it is neither.

    The mean is that of ``saved`` over some dimensions: distance and mean are at right angles, so
    that what rounding the distance leaves of an error is small beside ``saved``.
    """
    steps = _steps(there)
    if not steps or strip(steps[0].args[0], CASTS) is not saved:  # type: ignore[arg-type]
        return ()
    mean: Any = as_made(steps[0].args[1])  # type: ignore[arg-type]
    if mean.target is operator.getitem and mean.args[1] == 1:
        mean = mean.args[0]
    own = mean.target in _MEANS and strip(mean.args[0], IN_ORDER | CASTS) is saved
    again = _steps(later) if own and all(map(_takes_few, steps)) else ()
    restored = strip(again[0].args[0], CASTS) if again else None  # type: ignore[arg-type]
    return () if restored in _needed(again) else again


def _takes_few(step: fx.Node) -> bool:
    """It has one number for many elements."""
    vector = as_made(step.args[1])  # type: ignore[arg-type]
    return _FEW * elements_of(value_of(vector)) <= elements_of(value_of(step))


def _needed(steps: Sequence[fx.Node]) -> set[fx.Node]:
    """What the numbers that ``steps`` take are made of."""
    return {node for step in steps for node in made_of(step.args[1])}  # type: ignore[arg-type]


def _steps(result: fx.Node) -> tuple[fx.Node, ...]:
    """A difference, and what is a multiple of it, if ``result`` is one of both."""
    before = result.args[0] if result.target is aten.mul.Tensor else None
    steps = (before, result) if isinstance(before, fx.Node) else (result,)
    two = all(len(n.all_input_nodes) == len(n.args) == 2 and not n.kwargs for n in steps)
    return steps if steps[0].target is aten.sub.Tensor and two else ()


def put_back(restored: fx.Node, arriving: fx.Node, steps: Sequence[fx.Node]) -> None:
    """Have the backward make of ``arriving``, a norm's result, what it reads as ``restored``.

    Nothing is done without ``steps``.
    """
    if not steps:
        return
    needed = _needed(steps)
    graph, first = restored.graph, min(restored.users)
    copies = {node: node for node in needed if node < first}
    with graph.inserting_before(first):
        for node in sorted(needed - copies.keys()):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node]._rename(f"{node.name}_again")  # no name of the forward's
    emit, made = Emitter(graph, first, steps[0]), [arriving]
    for step in reversed(steps):
        undone = aten.add.Tensor if step.target is aten.sub.Tensor else aten.div.Tensor
        made.append(emit(undone, made[-1], copies[step.args[1]]))  # type: ignore[index]
    made.append(emit.cast(made[-1], restored.meta["val"].dtype))
    for node in dict.fromkeys(made[1:]):
        node.meta[_MARK] = restored.name if node is made[-1] else ""
        node._rename(f"{restored.name}_again")
    restored.replace_all_uses_with(made[-1])


def give_back(backward: fx.Graph, arriving: fx.Node) -> None:
    """Have the backward read a tensor that arrives, after all, where it was to be made again."""
    for node in backward.nodes:
        if node.meta.get(_MARK) == arriving.name:
            node.replace_all_uses_with(arriving)


def puts_back(node: fx.Node) -> bool:
    """``node`` undoes a step of a norm."""
    return _MARK in node.meta
