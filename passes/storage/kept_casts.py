"""Casts of weights that a backward had better keep than make again.

Under autocast a step casts every weight, and a backward that keeps none of these casts (they take
two bytes a weight) makes them again: six bytes a weight, read and written. That is nothing beside
products of many rows, and a tenth of a step of a thousand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from hot_compile.passes.base.graph import made_of_tangents, value_of
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.exact.casts import CAST
from hot_compile.passes.storage.allowed import dearest
from hot_compile.passes.storage.prices import readers
from hot_compile.passes.storage.step_time import StepTime

_SHARE = 1 / 3
"""Of a step's slack: casts are the dearest of what it pays for, by the bytes that they free."""


def casts_to_keep(
    graph: fx.Graph, step: StepTime | None, rates_of: Callable[[torch.device], Rates | None]
) -> tuple[list[str], float]:
    """Names of a joint graph's casts to keep, and the seconds that making the others takes."""
    if step is None:
        return [], 0.0
    seconds = {node: _seconds(node, rates_of) for node in _made_again(graph)}
    kept, left = dearest(seconds, _SHARE * step.slack)
    return [node.name for node in kept], left


def _made_again(graph: fx.Graph) -> list[fx.Node]:
    """Casts of inputs that a backward reads."""
    backward = made_of_tangents(graph)
    return [
        node
        for node in graph.find_nodes(op="call_function", target=CAST)
        if node.args[0].op == "placeholder" and any(user in backward for user in readers(node))
    ]


def _seconds(node: fx.Node, rates_of: Callable[[torch.device], Rates | None]) -> float:
    made, source = value_of(node), value_of(node.args[0])
    rates = rates_of(made.device)
    return (bytes_of(made) + bytes_of(source)) / rates.copy if rates else 0.0
