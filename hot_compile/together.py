"""All processes of a job go on with a graph in the same way: what fails in one, none goes on with.

They tell each other through the job's store, not by collectives: not every process has every graph.
So nobody waits for one that may never come. Who ends a stage (compiling, a first forward, a first
backward) waits for those that had begun it. Only where a graph has collectives of its own are all
awaited that take part in them: with another plan they might be in another order, and one process's
would meet another's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .again import called_by, called_in, sends
from .passes.base.graph import graphs_of
from .passes.cost.tuned import in_job

log = logging.getLogger("hot_compile")

LONGEST_S = 120.0
"""So long others are awaited, at most; who comes later still finds what was agreed on."""
_PAUSE_S = 0.005


class Together:
    """What processes of a job say of one graph. Ways to compile it are numbers that only rise."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: str) -> None:
        """``options``: what tells apart the same graph, compiled otherwise.

        The graph's sizes do not count: they may differ between processes.
        """
        self.members = _members(gm, example_inputs) if in_job() else frozenset()
        """Ranks that take part in collectives inside the graph."""
        self._store = distributed.distributed_c10d._get_default_store() if in_job() else None
        parts = [*called_in(gm), options, sorted(self.members)]
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        self._key = f"hot_compile/graphs/{digest}"
        if self._store:
            self._key += f"/{self._count(f'of rank {distributed.get_rank()}')}"

    @contextlib.contextmanager
    def stage(self, name: str, way: int) -> Iterator[None]:
        """Inside, a process is in a stage; however it leaves, it is not awaited any more."""
        self._count(f"{name}/{way}/begun")
        try:
            yield
        finally:
            self._count(f"{name}/{way}/ended")

    def failed(self, way: int, other: int) -> int:
        """Inside a stage: this process failed and would go on with ``other``. How all do."""
        if self._store is None:
            return other
        return int(self._store.compare_set(f"{self._key}/after {way}", "", str(other)))

    def left(self, way: int) -> int | None:
        """How all go on if somebody failed; None if nobody did, as far as is known now."""
        last = way
        while self._store and self._store.check([f"{self._key}/after {last}"]):
            last = int(self._store.get(f"{self._key}/after {last}"))
        return None if last == way else last

    def outcome(self, name: str, way: int) -> int | None:
        """The same, after those have ended the stage that are awaited."""
        if self._store is None:
            return None
        begun = self._count(f"{name}/{way}/begun", 0)
        until = time.monotonic() + LONGEST_S
        while True:
            ended = self._count(f"{name}/{way}/ended", 0)
            if ended >= begun and (ended >= len(self.members) or self.left(way) is not None):
                break
            if time.monotonic() > until:
                log.warning("hot: other processes do not say how they compile a graph")
                break
            time.sleep(_PAUSE_S)
        return self.left(way)

    def _count(self, what: str, more: int = 1) -> int:
        return self._store.add(f"{self._key}/{what}", more) if self._store else 0


def _members(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """Ranks that collectives inside a graph, or those that its DTensors will need, reach."""
    ranks: set[int] = set()
    for value in filter(is_traceable_wrapper_subclass, example_inputs):
        mesh = getattr(value, "device_mesh", None)
        ranks.update([] if mesh is None else mesh.mesh.flatten().tolist())
    for node in (node for graph in graphs_of(gm) for node in graph.nodes):
        ranks.update(_ranks_of(node) if sends(called_by(node)) else [])
    return frozenset(ranks)


def _ranks_of(node: fx.Node) -> Sequence[int]:
    """Of the group that a collective names."""
    for name in (arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)):
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            group = distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
            return distributed.get_process_group_ranks(group)
    return []
