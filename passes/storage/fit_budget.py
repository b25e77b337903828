"""Cut a graph so that a step stays within a peak: first by recomputing, then by storing.

Each only as far as it takes. What fits is cut as Inductor cuts it. Else pointwise results are
recomputed, which is exact (docs/adr/0004). If that is not enough, what crosses is stored
compressed. So with a smaller budget a step is never predicted to hold more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.site import bytes_of

_TRIES = 3


@dataclasses.dataclass(frozen=True)
class BudgetReport:
    """How a graph came to stay within a budget, as predicted."""

    asked: int
    """Bytes: the highest that the device's memory is to rise in a step."""
    standing: int
    """Bytes that stood before: parameters, inputs, gradients, an optimizer's states."""
    to_come: int
    """Bytes of such states that the first step may make: two numbers for each that is trained."""
    rise: int
    """Bytes that the step adds to them where it is highest."""
    held: int
    """Of these, between forward and backward."""
    most: int
    """The same with nothing recomputed or stored, as Inductor has it."""
    above: int
    """The same of the next choice that holds more; ``rise`` if there is none."""
    least: int | None = None
    """The least that any choice adds, if that was looked for."""
    recomputed: int = 0
    """Tensors that are recomputed and that Inductor would keep."""
    stored: int = 0
    """Tensors that are stored compressed."""
    hosted: int = 0
    """Tensors that wait in host memory, as they are stored."""
    between: bool = False
    """``most``, ``above`` and ``least`` are of what is held between forward and backward."""

    @property
    def peak(self) -> int:
        """Predicted."""
        return self.standing + self.to_come + self.rise


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What one graph may add to a device's memory."""

    asked: int
    standing: int
    to_come: int
    """As in ``BudgetReport``."""
    rise: int
    """Bytes that its step may add."""
    between: bool
    """Only between its forward and its backward: others of the same step run then."""
    strict: bool
    """Nothing ran yet: a budget that certainly cannot be met is the user's mistake."""
    tell: Callable[[BudgetReport], None]
    """Told what came of it."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How min-cut is to cut."""

    recompute: bool
    """Pointwise inputs of backward products, too."""
    keep: tuple[str, ...] = ()
    """But for these."""


@dataclasses.dataclass(frozen=True)
class BudgetTrial:
    """One way with what comes of it."""

    way: Way
    rise: int
    saved: dict[str, int]
    """Bytes of what crosses, by name."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Which way to cut, and what it is predicted to add."""

    way: Way
    stores: bool
    """That is not enough: what crosses is to be stored compressed."""
    rise: int
    most: int
    above: int
    recomputed: int = 0


def fit(allowed: int, cut: Callable[[Way], BudgetTrial], recompute: bool) -> Fit:
    """The way that holds most of those that add at most ``allowed`` bytes.

    Args:
        allowed: bytes. cut: tries a way.
        recompute: whether results may be recomputed that Inductor would keep.
    """
    whole = cut(Way(False))
    if whole.rise <= allowed or not recompute:
        return Fit(whole.way, whole.rise > allowed, whole.rise, whole.rise, whole.rise)
    least = cut(Way(True))
    spared = [name for name in whole.saved if name not in least.saved]
    count = len(spared)
    if least.rise > allowed:
        helps = least.rise < whole.rise
        way = least if helps else whole
        return Fit(way.way, True, way.rise, whole.rise, whole.rise, count if helps else 0)
    best, kept, above = least, 0, whole.rise
    high = count
    for _ in range(_TRIES):
        tried = _between(allowed, best.rise, above, [whole.saved[n] for n in spared[kept:high]])
        if not tried:
            break
        found = cut(Way(True, tuple(spared[: kept + tried])))
        if found.rise <= allowed:
            best, kept = found, kept + tried
        else:
            above, high = found.rise, kept + tried
    sizes = [whole.saved[name] for name in spared[kept:high]]
    more = max(0, above - best.rise) * sizes[0] // max(1, sum(sizes)) if sizes else 0
    return Fit(best.way, False, best.rise, whole.rise, best.rise + more, count - kept)


def _between(allowed: int, low: int, high: int, sizes: Sequence[int]) -> int:
    """How many of ``sizes`` lead from ``low`` to at most ``allowed``, if all lead to ``high``."""
    total, taken = sum(sizes), 0
    for count, size in enumerate(sizes[:-1], 1):
        taken += size
        if low + (high - low) * taken / max(1, total) > allowed:
            return count - 1
    return max(0, len(sizes) - 1)


def recomputes_collectives(graph: fx.Graph) -> bool:
    """The user has results of collectives recomputed: activation checkpointing around them.

    Whether a backward runs one again depends on what else is kept, and each process has a budget
    of its own device: they would wait for each other.
    """
    policies = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    return any(
        getattr(node.target, "namespace", "").startswith("_c10d_functional")
        and node.meta.get("recompute") in policies
        for node in graph.nodes
    )


def saved_sizes(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> dict[str, int]:
    """Bytes of what crosses, by name."""
    return {saved.name: bytes_of(saved.meta["val"]) for saved, _ in pairs}
