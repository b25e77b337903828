"""How the bytes held for the backward rise and fall over one step, by the graphs: a prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set

from .graphs import BACKWARD, FORWARD, Fact, Snapshot, arrivals
from .passes.storage.record import Crossing
from .record import GraphReport


@dataclasses.dataclass(frozen=True)
class Point:
    """From here on, until the next point, this much is held."""

    at: float
    """Share of the step's operations done, forward and backward; no measure of time."""
    stored: int
    """Bytes as they are stored."""
    uncompressed: int
    """Bytes if the same tensors were kept as they are."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Points in order; forward up to ``turn``, backward from there."""

    points: tuple[Point, ...]
    turn: float


def held_over_step(reports: Sequence[GraphReport], turn: float | None = None) -> Timeline:
    """What crosses, from where the forward makes it to where the backward first reads it.

    The forwards of several graphs run in their order, the backwards in the opposite one. Operations
    that pack and restore count no place of their own. What either side needs for itself,
    parameters, gradients and inputs are not counted.

    Args:
        reports: of one step, in order.
        turn: where the backward is to begin, so that it does so in several timelines side by side;
            by default after the forward's share of all operations.

    Raises:
        ValueError: a report has no graphs.
    """
    if not all({FORWARD, BACKWARD} <= report.stages.keys() for report in reports):
        raise ValueError("got a report without its graphs; expected one of explain's.")
    lengths = [tuple(len(_joint(r) & _names(r.stages[side])) for side in _SIDES) for r in reports]
    forward, backward = (sum(side) for side in zip(*lengths, strict=True)) if lengths else (0, 0)
    changes: list[tuple[int, tuple[int, int]]] = []  # (place, bytes (stored, uncompressed))
    begin, end = 0, forward + backward
    for report, (ahead, back) in zip(reports, lengths, strict=True):
        for crossing, (made, read) in _lives(report).items():
            sizes = crossing.bytes, crossing.bytes_before
            changes.append((begin + made, sizes))
            changes.append((end - back + read, (-sizes[0], -sizes[1])))
        begin, end = begin + ahead, end - back
    whole = forward + backward
    middle = forward / max(1, whole) if turn is None else turn

    def share(place: int) -> float:
        if place < forward:
            return place / forward * middle
        return 1.0 - (whole - place) / max(1, backward) * (1.0 - middle)

    return Timeline(_summed((share(place), *sizes) for place, sizes in changes), middle)


_SIDES = (FORWARD, BACKWARD)


def _counts(node: Fact, joint: Set[str]) -> bool:
    return node.op == "call_function" and node.name in joint


def _names(graph: Snapshot) -> set[str]:
    return {node.name for node in graph.nodes if node.op == "call_function"}


def _joint(report: GraphReport) -> set[str]:
    """Operations of the joint graph: the rest of a side packs and restores."""
    return set().union(*(_names(s) for stage, s in report.stages.items() if stage not in _SIDES))


def _lives(report: GraphReport) -> dict[Crossing, tuple[int, int]]:
    """Each crossing tensor: places, among a side's own operations, where it is made and read."""
    forward, backward = report.stages[FORWARD], report.stages[BACKWARD]
    joint = _joint(report)
    made, place = {}, 0
    for node in forward.nodes:
        made[node.name] = place
        place += _counts(node, joint)
    arrived = arrivals(forward, backward)
    read: dict[str, int] = {}
    place = 0
    for node in backward.nodes:
        for name in node.inputs:
            if name in arrived:
                read[arrived[name]] = place  # the last reader's
        place += _counts(node, joint)
    last = place
    return {
        c: (made.get(c.name, 0), max((read[p] for p in c.parts if p in read), default=last))
        for c in report.crossing
    }


def _summed(changes: Iterable[tuple[float, int, int]]) -> tuple[Point, ...]:
    points = [Point(0.0, 0, 0)]
    for place, stored, uncompressed in sorted(changes):
        before = points[-1]
        now = Point(place, before.stored + stored, before.uncompressed + uncompressed)
        points[-1:] = [now] if before.at == now.at else [before, now]
    return tuple(points)
