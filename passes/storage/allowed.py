"""How long storing, and making again what is not stored, may take a step.

What layers on integers and exact forms win pays for it, and a share of the step comes on top
(``step_time.SLACK``). So a step is as long as stock's, by prediction, to within that share. One
that is predicted to wait for its host gets no share: storing takes as many launches as others save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.exact.casts import cast_groups, count_groups
from hot_compile.passes.exact.functions import seconds_shortened
from hot_compile.passes.storage.prices import LAUNCH
from hot_compile.passes.storage.step_time import StepTime


def seconds_allowed(
    step: StepTime,
    won: float,
    won_by_forms: float,
    graphs: Sequence[fx.Graph],
    rates_of: Callable[[torch.device], Rates | None],
) -> float:
    """In all.

    Args:
        step: as it comes.
        won, won_by_forms: seconds by which layers and exact forms make it shorter.
        graphs: forward and backward where what has a shorter form takes it; else none.
        rates_of: a device's.
    """
    if step.waits_for_host:
        return won + sum(_launches_saved(graph, rates_of) for graph in graphs[:1])
    return won + step.slack + won_by_forms + sum(seconds_shortened(g, rates_of) for g in graphs)


def dearest(seconds: Mapping[fx.Node, float], most: float) -> tuple[list[fx.Node], float]:
    """Those to leave out, the dearest first, so that the rest takes at most ``most``; and what it
    takes."""
    left, out = sum(seconds.values()), list[fx.Node]()
    for node in sorted(seconds, key=lambda each: -seconds[each]):
        if left <= most:
            break
        left -= seconds[node]
        out.append(node)
    return out, left


def _launches_saved(graph: fx.Graph, rates_of: Callable[[torch.device], Rates | None]) -> float:
    """Seconds of the host that a forward's casts and counters take less together."""
    total = 0.0
    for group in (*cast_groups(graph), *count_groups(graph)):
        rates = rates_of(group[0].meta["val"].device)
        total += (len(group) - 1) * LAUNCH * rates.launch if rates else 0.0
    return total
