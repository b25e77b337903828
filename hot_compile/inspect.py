"""What the backend did to each graph: records, dumps, and the table ``explain`` prints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx

from .config import Strategy
from .passes.crossing import Crossing
from .passes.head.plan import HeadDecision
from .passes.plan import Decision, Plan

NO_PLAN = Plan("exact", ())


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One compiled training graph: its plan as carried out, and what crosses to the backward."""

    plan: Plan
    crossing: tuple[Crossing, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes kept from forward to backward, parameters and inputs aside."""
        return sum(c.bytes for c in self.crossing)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "plan": self.plan.to_json(),
            "crossing": [dataclasses.asdict(c) for c in self.crossing],
            "held_bytes": self.held_bytes,
        }


class Dump:
    """Recorder that writes every stage's graph, plan.json and crossing.json below a folder."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = _next_graph_folder(folder) if folder else None
        self._count = itertools.count()

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Write the graph as it is after (or before) ``stage``."""
        if self._folder is None:
            return
        owner = graph if isinstance(graph, fx.GraphModule) else fx.GraphModule({}, graph)
        text = owner.print_readable(print_output=False)
        (self._folder / f"{next(self._count):02d}.{stage}.py").write_text(text)

    def finished(self, plan: Plan | None, crossing: tuple[Crossing, ...]) -> None:
        """Write plan.json and crossing.json."""
        if self._folder is None:
            return
        data = GraphReport(plan or NO_PLAN, crossing).to_json()
        for name in ("plan", "crossing"):
            text = json.dumps(data[name], indent=1, default=str)
            (self._folder / f"{name}.json").write_text(text + "\n")


class Reports:
    """Recorder that keeps each training graph's report."""

    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []

    def graph(self, stage: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Stages are not kept."""

    def finished(self, plan: Plan | None, crossing: tuple[Crossing, ...]) -> None:
        """Keep the report."""
        self.graphs.append(GraphReport(plan or NO_PLAN, crossing))


def _next_graph_folder(folder: str) -> Path:
    """``folder/graph_NNN``, the first number not taken (other processes may be dumping too)."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        path = root / f"graph_{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``backend="hot"`` does to a model; prints itself as a table."""

    graphs: tuple[GraphReport, ...]

    @property
    def plan(self) -> Plan:
        """All layers of all graphs, in order."""
        recipe = self.graphs[0].plan.recipe if self.graphs else "hot"
        heads = tuple(h for graph in self.graphs for h in graph.plan.heads)
        return Plan(recipe, tuple(d for graph in self.graphs for d in graph.plan), heads)

    @property
    def held_bytes(self) -> int:
        """Bytes kept from forward to backward by all graphs together."""
        return sum(graph.held_bytes for graph in self.graphs)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form of every graph."""
        return {"graphs": [graph.to_json() for graph in self.graphs]}

    def table(self) -> Table:
        """Layer, shape, strategy or refusal and why, saved bytes, predicted gain."""
        title = (
            f"recipe {self.plan.recipe!r}: {len(self.plan.rewritten)} of {len(self.plan.decisions)}"
        )
        table = Table(title=f"{title} products rewritten", box=box.SIMPLE, title_justify="left")
        for column in ("layer", "L x O x I", "strategy", "gain", "saved before", "after", "why"):
            numeric = column in ("gain", "saved before", "after")
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        stored = self._stored_bytes()
        for decisions in _folded(self.plan):
            first, *more = _row(decisions[0], stored.pop(decisions[0].site.split("#")[0], 0))
            table.add_row(first if len(decisions) == 1 else f"{first} ({len(decisions)}x)", *more)
        return table

    def _stored_bytes(self) -> dict[str, int]:
        """By layer: bytes of compressed x that cross; a shared x counts once, as the first's."""
        stored: Counter[str] = Counter()
        for graph in self.graphs:
            for c in graph.crossing:
                stored[c.module] += c.bytes if c.packed else 0
        return dict(stored)

    def __str__(self) -> str:
        console = Console(width=140, record=False)
        with console.capture() as capture:
            console.print(self.table())
            if self.plan.heads:
                console.print(head_table(self.plan.heads))
            before = sum(c.bytes_before for graph in self.graphs for c in graph.crossing)
            console.print(
                f"held between forward and backward: {megabytes(self.held_bytes)} "
                f"({megabytes(before)} uncompressed)"
            )
        return capture.get()


def _folded(plan: Plan) -> list[list[Decision]]:
    """Decisions in order; those left alone in one module for one reason become one entry."""
    entries: dict[object, list[Decision]] = {}
    for d in plan:
        exact = d.strategy is Strategy.EXACT
        key = (d.site.split("#")[0], d.reason) if exact else d.site
        entries.setdefault(key, []).append(d)
    return list(entries.values())


def _row(d: Decision, stored: int) -> tuple[str, ...]:
    exact = d.strategy is Strategy.EXACT
    bits = "" if exact or not d.gx else f" (g_x INT{d.gx_bits})"
    return (
        d.site,
        " x ".join(d.shape),
        f"{d.strategy}{bits}",
        "" if exact else f"{d.predicted_gain:.2f}x",
        megabytes(d.bytes_before),
        "" if exact else megabytes(stored),
        d.reason or ("" if stored or not d.gw else "x is recomputed, or kept for another reader"),
    )


def head_table(heads: Sequence[HeadDecision]) -> Table:
    """Heads: name, shape, in chunks or not and why, bytes of logits and gradient that never are."""
    title = "heads with their losses, exact"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("head", "L x O x I", "logits", "a chunk", "never exist", "in chunks", "why"):
        sizes = column in ("logits", "a chunk", "never exist")
        table.add_column(column, justify="right" if sizes else "left", overflow="fold")
    for head in heads:
        saved = (head.chunk_bytes, head.bytes_left_out)
        shown = [megabytes(n) if head.chunked else "" for n in saved]
        shape, whole = " x ".join(head.shape), megabytes(head.logits_bytes)
        table.add_row(head.name, shape, whole, *shown, head.way, head.reason)
    return table


def megabytes(count: int) -> str:
    """``count`` bytes as text, in MiB."""
    return f"{count / 2**20:.2f} MiB"


def explain(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> Explanation:
    """What ``torch.compile(model, backend="hot", options=options)`` does to each layer, and why.

    Traces one training forward of ``model`` on ``inputs`` through every stage and prints the table.
    The graphs run uncompiled, so this takes seconds; buffers and the RNG are put back as they were.

    Args:
        model: an ``nn.Module`` (or function) in training mode.
        inputs: what a training step passes to it; shapes and dtypes matter, values hardly.
        options: as for ``torch.compile``.

    Returns:
        An :class:`Explanation`; ``.plan``, ``.held_bytes`` and ``.to_json()`` are for programs.
    """
    from .backend import hot  # the backend imports this module

    reports = Reports()
    backend = functools.partial(
        hot, options=options, recorder=reports, inner_compile=run_uncompiled
    )
    with unchanged(model), torch.enable_grad():
        torch.compile(model, backend=backend)(*inputs)
    explanation = Explanation(tuple(reports.graphs))
    print(explanation)
    return explanation


def run_uncompiled(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """Stand-in for Inductor's lowering: the finished graph, run node by node."""
    return make_boxed_func(gm.forward)


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Put buffers and random state back, and forget the compilations made inside."""
    buffers = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    torch._dynamo.reset()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch._dynamo.reset()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
