"""``explain``: what the backend does to each layer of a model, and why, as a table."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import fx

from .again import twin
from .backend import hot
from .config import Strategy
from .figures import most_frequent_reason
from .page import save_page
from .passes.cost import tuned
from .passes.head.plan import HeadDecision
from .passes.layers.decision import Decision
from .passes.plan import Plan
from .passes.profile.profile import Profile
from .passes.storage.record import Crossing
from .progress import progress
from .record import GraphReport, Reports, run_uncompiled
from .stand_in import compiled_by, laid_over
from .tables import PlainTable, as_html, rendered
from .unchanged import reached, unchanged


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``backend="hot"`` does to a model; prints itself as a table."""

    graphs: tuple[GraphReport, ...]
    note: str = ""
    """What is to be known of the predictions."""

    @property
    def plan(self) -> Plan:
        """All layers of all graphs, in order."""
        recipe = self.graphs[0].plan.recipe if self.graphs else "hot"
        decisions = (d for graph in self.graphs for d in graph.plan)
        forms = (form for graph in self.graphs for form in graph.plan.exact_forms)
        heads = (head for graph in self.graphs for head in graph.plan.heads)
        forwards = (forward for graph in self.graphs for forward in graph.plan.forwards)
        rates = dict.fromkeys(text for graph in self.graphs for text in graph.plan.rates)
        exact = tuple(forms), tuple(heads), tuple(forwards)
        return Plan(recipe, tuple(decisions), *exact, tuple(rates))

    @property
    def digest(self) -> str:
        """Short hash of what was chosen for all graphs."""
        return hashlib.sha256(repr([g.digest for g in self.graphs]).encode()).hexdigest()[:12]

    @property
    def held_bytes(self) -> int:
        """Bytes kept from forward to backward by all graphs together."""
        return sum(graph.held_bytes for graph in self.graphs)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form of every graph."""
        return {"graphs": [graph.to_json() for graph in self.graphs]}

    def save_html(self, path: str | Path, profile: Profile | str | Path | None = None) -> None:
        """Write all of it as one self-contained page: layers, what crosses, graphs.

        ``profile``: what calibration measured, or its file; the layers' errors are then shown.
        """
        save_page(path, self.graphs, profile=profile, note=self.note)

    def table(self) -> Table:
        """Layer, shape, strategy or refusal and why, saved bytes, predicted gain.

        Layers of which all is alike but a number in their path are one row, its number a ``*``.
        """
        title = (
            f"recipe {self.plan.recipe!r}: {len(self.plan.rewritten)} of {len(self.plan.decisions)}"
        )
        numbers = ("gain", "saved before", "after")
        columns = ("layer", "L x O x I", "backward", *numbers, "why")
        table = PlainTable(f"{title} products rewritten", *columns, right=set(numbers))
        stored = self._stored_bytes()
        alike: dict[tuple[str, ...], list[tuple[str, int]]] = {}
        for decisions in _folded(self.plan):
            first, *more = _row(decisions[0], stored.pop(decisions[0].site.split("#")[0], 0))
            pattern = ".".join("*" if part.isdigit() else part for part in first.split("."))
            alike.setdefault((pattern, *more), []).append((first, len(decisions)))
        for (pattern, *more), rows in alike.items():
            name = rows[0][0] if len(rows) == 1 else pattern
            count = sum(number for _, number in rows)
            table.add(name if count == 1 else f"{name} ({count}x)", *more)
        return table

    def forms_table(self) -> Table:
        """What stays exact and has a faster form that is as exact: whether it gets it, and why."""
        table = PlainTable("exact forms", "layer", "form", "taken", "why")
        for form in self.plan.exact_forms:
            table.add(form.layer, form.form, "yes" if form.taken else "no", form.reason)
        return table

    def forwards_table(self) -> Table:
        """With an 8-bit forward: which layers' products are on INT8, and why the others are not."""
        taken = sum(forward.int8 for forward in self.plan.forwards)
        title = f"forward: {taken} of {len(self.plan.forwards)} products on INT8"
        table = PlainTable(title, "layer", "forward", "gain", "why", right={"gain"})
        for forward in self.plan.forwards:
            gain = f"{forward.predicted_gain:.2f}x" if forward.int8 else ""
            table.add(forward.site, forward.way, gain, forward.reason)
        return table

    def _stored_bytes(self) -> dict[str, int]:
        """By layer: bytes of compressed x that cross; a shared x counts once, as the first's."""
        stored: Counter[str] = Counter()
        for graph in self.graphs:
            for c in graph.crossing:
                stored[c.module] += c.bytes if c.packed else 0
        return dict(stored)

    def _asked_for(self) -> list[Crossing]:
        """Tensors that an option or a monitor wants in more bits."""
        return [c for graph in self.graphs for c in graph.crossing if c.asked_bits]

    def __str__(self) -> str:
        return rendered(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Table | str]:
        """What is printed, in order."""
        yield self.table()
        if not self.plan.rewritten:
            yield why_nothing(self.plan)
        if self.plan.forwards:
            yield self.forwards_table()
        if self.plan.exact_forms:
            yield self.forms_table()
        if self.plan.heads:
            yield head_table(self.plan.heads)
        for c in self._asked_for():
            yield f"{c.module} ({c.name}) is stored as {c.scheme}: {c.reason}"
        before = sum(c.bytes_before for graph in self.graphs for c in graph.crossing)
        held = megabytes(self.held_bytes)
        yield f"held between forward and backward: {held} ({megabytes(before)} uncompressed)"
        yield predicted_time(self.graphs)
        yield from (f"a step: {g.plan.step}" for g in self.graphs if g.plan.step)
        yield from dict.fromkeys(
            f"as earlier runs found, {g.plan.known} (hot-compile profile forget forgets it)"
            for g in self.graphs
            if g.plan.known
        )
        yield from (self.note,) if self.note else ()
        yield from budgets(self.graphs)
        rates = "; ".join(self.plan.rates) or "none, nothing was priced"
        yield f"rates: {rates}; plan {self.digest}"


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
    return (
        d.site,
        " x ".join(d.shape),
        d.way,
        "" if exact else f"{d.predicted_gain:.2f}x",
        megabytes(d.bytes_before),
        "" if exact else megabytes(stored),
        d.reason or ("" if stored or not d.gw else "x is recomputed, or kept for another reader"),
    )


def head_table(heads: Sequence[HeadDecision]) -> Table:
    """Heads: name, shape, in chunks or not and why, bytes of logits and gradient that never are."""
    sizes = ("logits", "a chunk", "never exist")
    columns = ("head", "L x O x I", *sizes, "in chunks", "why")
    title = "heads with their losses: exact, unless why says int8"
    table = PlainTable(title, *columns, right=set(sizes))
    for head in heads:
        saved = (head.chunk_bytes, head.bytes_left_out)
        shown = [megabytes(n) if head.chunked else "" for n in saved]
        shape, whole = " x ".join(head.shape), megabytes(head.logits_bytes)
        table.add(head.name, shape, whole, *shown, head.way, head.reason)
    return table


def megabytes(count: int) -> str:
    """``count`` bytes as text, in MiB."""
    return f"{count / 2**20:.2f} MiB"


def predicted_time(graphs: Sequence[GraphReport]) -> str:
    """What storing is predicted to cost a step and layers to win, and what comes of both."""
    won = sum(graph.plan.seconds_won for graph in graphs)
    seconds = [graph.storing_seconds for graph in graphs]
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "predicted time of storing: unknown, there are no rates for this device"
    cost = sum(known)
    storing = f"storing {'costs' if cost >= 0 else 'wins'} {milliseconds(cost)}"
    step = f"{milliseconds(cost - won)} {'more' if cost > won else 'less'} than exact"
    layers = f"layers {'win' if won >= 0 else 'cost'} {milliseconds(won)}"
    return f"predicted: {storing}, {layers}; a step takes {step}"


def budgets(graphs: Sequence[GraphReport]) -> list[str]:
    """How each graph's step stays within a budget of the device's memory, where there is one."""
    texts = []
    for met in (graph.budget for graph in graphs if graph.budget):
        parts = {
            "stand before it": met.standing,
            "may come with an optimizer": met.to_come,
            "are added": met.rise,
        }
        known = [f"{megabytes(size)} {what}" for what, size in parts.items() if size]
        done = f"{met.recomputed} tensors recomputed, {met.stored} stored compressed"
        done += f", {met.hosted} in host memory" if met.hosted else ""
        texts.append(
            f"budget of the peak: {megabytes(met.asked)} asked, {megabytes(met.peak)} predicted "
            f"({', '.join(known)}), {megabytes(met.peak - met.rise + met.most)} without; {done}"
        )
    return texts


def why_nothing(plan: Plan) -> str:
    """Why no product was rewritten, in a sentence: the most frequent reason."""
    if not plan.decisions:
        return (
            'No product was found: nothing that needs a gradient was compiled by "hot", or it has '
            "no Linear and no convolution."
        )
    return f"No product was rewritten. The most frequent reason: {most_frequent_reason(plan)}."


def rates_note(devices: Iterable[torch.device]) -> str:
    """That nothing was measured on one of these devices, if it is so."""
    bare = {d.type for d in devices if d.type in ("cpu", "cuda") and not tuned.path_of(d).exists()}
    if not bare:
        return ""
    names = " and ".join(sorted(bare))
    return (
        f"Predicted by a built-in table: nothing was measured on this machine's {names} yet. "
        "Run hot-compile tune."
    )


def milliseconds(seconds: float) -> str:
    """How long ``seconds`` are, whatever their sign, in ms."""
    return f"{abs(seconds) * 1e3:.3g} ms"


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """What ``torch.compile(model, backend="hot", options=options)`` does to each layer, and why.

    Traces one training step of ``model`` on ``inputs`` through every stage and prints the table.
    Graphs pass through every stage but are not lowered: what runs is the model's own code, so this
    takes seconds, with any operator that Inductor takes. Buffers, gradients and the random state
    are put back as they were; so are parameters and the optimizer's state if the step changes them.
    What else it changes stays changed (a learning rate's scheduler, iterators).

    Args:
        model: an ``nn.Module`` in training mode, or any function of a training step: it may compute
            the loss, call ``backward`` and step an optimizer. Models are found through its
            arguments, closure and globals. What is compiled by "hot" already (``model.compile``,
            ``torch.compile``) is explained piece by piece as it is compiled.
        inputs, keywords: what a training step passes to it; shapes and dtypes matter, values
            hardly. A model with an argument ``options`` of its own goes into a function:
            ``explain(lambda: model(x, options=...))``.
        options: as for ``torch.compile``; over those that a compiled model has of its own.

    Returns:
        An :class:`Explanation`; ``.plan``, ``.held_bytes`` and ``.to_json()`` are for programs.

    Raises:
        TypeError: ``model`` cannot be called, or ``options`` is no dict.
    """
    check_arguments("explain", model, options)
    reports, found = Reports(), reached(model, inputs, keywords)
    with (
        progress(1) as begin,
        unchanged(found) as set_aside,
        torch.enable_grad(),
        compiled_by(model, found, reporting(reports, options, set_aside)) as compiled,
    ):
        begin("tracing one training step")
        compiled(*inputs, **keywords)
    explanation = Explanation(tuple(reports.graphs), rates_note(found.devices))
    print(explanation)
    return explanation


def reporting(
    reports: Reports,
    options: Mapping[str, Any] | None,
    before: Callable[[Sequence[Any]], None] = lambda arguments: None,
    **keywords: Any,
) -> Callable[..., Any]:
    """A backend that lets ``hot`` report on every graph and runs the model's own code.

    ``before`` sees the arguments of every call. ``keywords`` are ``hot``'s.
    """

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Any:
        own = twin(gm)
        lowering: dict[str, Any] = {"inner_compile": run_uncompiled, **keywords}
        hot(gm, example_inputs, recorder=reports, **laid_over(options, asked), **lowering)

        def run(*arguments: Any) -> Any:
            before(arguments)
            return own.forward(*arguments)

        return run

    return backend


def check_arguments(name: str, model: Any, options: Any) -> None:
    """Raises TypeError if ``model`` cannot be called or ``options`` is neither None nor a dict."""
    if not callable(model):
        raise TypeError(
            f"got a {type(model).__name__} to {name}; expected an nn.Module or a function of a "
            f"training step. Pass it first: {name}(model, *inputs)."
        )
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            f"got options of type {type(options).__name__}; expected a dict of the backend's "
            "options. If the model has an argument of that name, pass a function: "
            f"{name}(lambda: model(..., options=...))."
        )
