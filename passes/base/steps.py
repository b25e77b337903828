"""How a pipeline's steps are run: in order, timed, counted and traced."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from hot_compile.passes.base.graph import readable

log = logging.getLogger("hot_compile")

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Step(Generic[State]):
    """One step of a pipeline."""

    name: str
    run: Callable[[State], int]
    """Does it; gives how many things it found, chose or changed."""
    changes: bool = False
    """It changes the graph."""
    needed: bool = False
    """Where it finds nothing, nothing is left to do for the others."""


def run(
    pipeline: str, steps: tuple[Step[State], ...], state: State, graphs: Mapping[str, fx.Graph]
) -> bool:
    """Run ``steps`` on ``state`` in order; whether none stopped the others.

    ``graphs``: by name, what steps with ``changes`` may change; traced after each that did.
    """
    done: list[tuple[str, int, float]] = []
    stopped = False
    for step in steps:
        begin = time.perf_counter()
        count = step.run(state)
        spent = 1e3 * (time.perf_counter() - begin)
        done.append((step.name, count, spent))
        log.debug("hot: %s.%s: %d in %.1f ms", pipeline, step.name, count, spent)
        if step.changes and count:
            for name, graph in graphs.items():
                traced_graph(f"hot_{pipeline}_{step.name}_{name}", graph)
        stopped = step.needed and not count
        if stopped:
            break
    told = ", ".join(f"{name} {count}" for name, count, _ in done)
    log.info("hot: %s: %s; %.0f ms", pipeline, told, sum(spent for *_, spent in done))
    fields = ("step", "count", "milliseconds")
    rows = [dict(zip(fields, row, strict=True)) for row in done]
    traced(f"hot_{pipeline}_steps", lambda: rows)
    return not stopped


def traced(name: str, content: Callable[[], Any]) -> None:
    """Leave JSON-ready ``content`` in the trace that tlparse reads, where one is written."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(content(), indent=1, default=str),
    )


def traced_graph(name: str, graph: fx.Graph) -> None:
    """Leave a graph's code there."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: readable(graph),
    )
