"""``explain``: what the backend does to each layer of a model, and why, as a table."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx
import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from .backend import hot
from .config import Strategy
from .graphs import union
from .observing.watching import twin
from .page import save_page
from .passes.head.plan import HeadDecision
from .passes.layers.plan import Decision, Plan
from .passes.measure.profile import Profile
from .record import GraphReport, Reports, run_uncompiled
from .tables import PlainTable


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``backend="hot"`` does to a model; prints itself as a table."""

    graphs: tuple[GraphReport, ...]

    @property
    def plan(self) -> Plan:
        """All layers of all graphs, in order."""
        recipe = self.graphs[0].plan.recipe if self.graphs else "hot"
        decisions = (d for graph in self.graphs for d in graph.plan)
        forms = (form for graph in self.graphs for form in graph.plan.exact_forms)
        heads = (head for graph in self.graphs for head in graph.plan.heads)
        return Plan(recipe, tuple(decisions), tuple(forms), tuple(heads))

    @property
    def held_bytes(self) -> int:
        """Bytes kept from forward to backward by all graphs together."""
        return sum(graph.held_bytes for graph in self.graphs)

    @functools.cached_property
    def graph(self) -> networkx.DiGraph:
        """The joint graphs with the plan carried out, side by side (``hot_compile.graphs``)."""
        return union(self.graphs)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form of every graph."""
        return {"graphs": [graph.to_json() for graph in self.graphs]}

    def save_html(self, path: str | Path, profile: Profile | str | Path | None = None) -> None:
        """Write all of it as one self-contained page: layers, what crosses, graphs.

        ``profile``: what calibration measured, or its file; the layers' errors are then shown.
        """
        save_page(path, self.graphs, profile=profile)

    def table(self) -> Table:
        """Layer, shape, strategy or refusal and why, saved bytes, predicted gain."""
        title = (
            f"recipe {self.plan.recipe!r}: {len(self.plan.rewritten)} of {len(self.plan.decisions)}"
        )
        numbers = ("gain", "saved before", "after")
        columns = ("layer", "L x O x I", "strategy", *numbers, "why")
        table = PlainTable(f"{title} products rewritten", *columns, right=set(numbers))
        stored = self._stored_bytes()
        for decisions in _folded(self.plan):
            first, *more = _row(decisions[0], stored.pop(decisions[0].site.split("#")[0], 0))
            table.add(first if len(decisions) == 1 else f"{first} ({len(decisions)}x)", *more)
        return table

    def forms_table(self) -> Table:
        """What stays exact and has a faster form that is as exact: whether it gets it, and why."""
        table = PlainTable("exact forms", "layer", "form", "taken", "why")
        for form in self.plan.exact_forms:
            table.add(form.layer, form.form, "yes" if form.taken else "no", form.reason)
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
            if self.plan.exact_forms:
                console.print(self.forms_table())
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
    sizes = ("logits", "a chunk", "never exist")
    columns = ("head", "L x O x I", *sizes, "in chunks", "why")
    table = PlainTable("heads with their losses, exact", *columns, right=set(sizes))
    for head in heads:
        saved = (head.chunk_bytes, head.bytes_left_out)
        shown = [megabytes(n) if head.chunked else "" for n in saved]
        shape, whole = " x ".join(head.shape), megabytes(head.logits_bytes)
        table.add(head.name, shape, whole, *shown, head.way, head.reason)
    return table


def megabytes(count: int) -> str:
    """``count`` bytes as text, in MiB."""
    return f"{count / 2**20:.2f} MiB"


def explain(model: Any, *inputs: Any, options: Mapping[str, Any] | None = None) -> Explanation:
    """What ``torch.compile(model, backend="hot", options=options)`` does to each layer, and why.

    Traces one training forward of ``model`` on ``inputs`` through every stage and prints the table.
    Graphs pass through every stage but are not lowered: what runs is the model's own code, so this
    takes seconds, with any operator that Inductor takes. Buffers and the random state are put back
    as they were.

    Args:
        model: an ``nn.Module`` (or function) in training mode.
        inputs: what a training step passes to it; shapes and dtypes matter, values hardly.
        options: as for ``torch.compile``.

    Returns:
        An :class:`Explanation`; ``.plan``, ``.held_bytes`` and ``.to_json()`` are for programs.
    """
    reports = Reports()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        own = twin(gm)
        hot(gm, example_inputs, options=options, recorder=reports, inner_compile=run_uncompiled)
        return own.forward

    with unchanged(model), torch.enable_grad():
        torch.compile(model, backend=backend)(*inputs)
    explanation = Explanation(tuple(reports.graphs))
    print(explanation)
    return explanation


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
