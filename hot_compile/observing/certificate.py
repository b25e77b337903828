"""What the looks at a training run found, in an object that prints as one paragraph."""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import innermost_backend

from hot_compile.config import Strategy
from hot_compile.observing.evidence import Spread, faults
from hot_compile.observing.monitor import KEPT_AS, Look, Monitor
from hot_compile.passes.storage.step_time import StepTime
from hot_compile.sizes import memory_text, time_text

if TYPE_CHECKING:
    from hot_compile.observing.gauge import Gauge

_SETTLED = "the first looks of an earlier run found nothing, so this run looks later"


@dataclasses.dataclass(frozen=True)
class Ran:
    """How steps ran, measured."""

    seconds: float
    """Of a step, the median."""
    quarters: tuple[float, float]
    """Seconds: a quarter of the steps took less than the first, a quarter more than the second."""
    steps: int
    """Measured."""
    peak: int
    """Bytes: on a GPU the allocator's peak, of what is the script's; on a CPU how far tensors'
    memory rises in a step, by replaying every allocation and release."""
    turns: tuple[float, ...] = ()
    """Seconds of a step in each turn; those of the same place took turns with one another."""

    def __str__(self) -> str:
        return f"peak {memory_text(self.peak)}, step {time_text(self.seconds)}"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was found of a monitored run. Nothing in it is predicted."""

    layers: int
    """Layers with a backward product that were looked at."""
    on_integers: int
    """Of these, how many have it on integers."""
    errors: Spread | None
    """Of the parameters' gradients at the last look, relative to exact; None before it."""
    noise: Spread | None
    """One deviation of the exact gradients from look to look, relative; None before the second."""
    bias: Spread | None
    """What the errors of all looks have in common, relative; None before the fourth."""
    off: Mapping[str, str]
    """Parameters that are over the budget now, and by how much; empty without a budget."""
    looks: tuple[Look, ...]
    """All of them, first to last."""
    compiles: int
    """Graphs compiled, each time counted."""
    repaired: Mapping[str, str]
    """Layers and tensors that were made more exact, how, and why."""
    unseen: Mapping[str, str]
    """What could not be looked at, and why."""
    hot: Ran | None = None
    """How steps ran, if that was measured."""
    stock: Ran | None = None
    """How they ran by stock Inductor, if that was measured."""
    parts: Mapping[str, Ran] = dataclasses.field(default_factory=dict)
    """How steps ran without one part of hot each, if hot was slower than stock."""
    left_out: str = ""
    """What the next runs go without, and why; empty: nothing."""
    times: Mapping[str, StepTime] = dataclasses.field(default_factory=dict)
    """How long graphs' steps take a GPU and its host, where that was measured in the run."""
    rounding: Spread | None = None
    """What exact code of two kinds differs by, in bf16 and in fp32, say, relative; None where
    nothing was in doubt. Errors of that size are not hot's."""
    graphs: int = 1
    """Those that looks are at now, each compiled once or more often."""
    exact: int = 0
    """Of these, how many have nothing rounded: there is nothing to compare."""

    def json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return dataclasses.asdict(self)

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`json` to ``path``."""
        Path(path).write_text(json.dumps(self.json(), indent=1) + "\n")

    def __str__(self) -> str:
        parts = [f"{self.on_integers} of {self.layers} layers on integers"] * bool(self.layers)
        parts += [f"{self.hot}" + (f" (stock: {self.stock})" if self.stock else "")] * bool(
            self.hot
        )
        parts += _of_gradients(self)
        count = f"{_count(len(self.looks), 'look')}, {_count(self.compiles, 'compile')}"
        count += f" of {self.graphs} graphs" * (self.graphs > 1)
        raised = [f"{len(self.repaired)} layers or tensors made more exact"] * bool(self.repaired)
        unseen = [f"{names} ({why})" for why, names in _by_reason(self.unseen).items()]
        more = [f"Not looked at: {'; '.join(unseen)}."] * bool(unseen)
        off = [f"{name}: {why}" for name, why in self.off.items()]
        more += [f"A step takes {step}." for step in dict.fromkeys(map(str, self.times.values()))]
        more += [f"OVER BUDGET: {'; '.join(off[:3])}{' and more' * (len(off) > 3)}."] * bool(off)
        return " ".join([", ".join([*parts, count, *raised]) + ".", *more])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


def _by_reason(unseen: Mapping[str, str]) -> dict[str, str]:
    """For each reason the first that has it, and how many more do."""
    names: dict[str, list[str]] = {}
    for name, why in unseen.items():
        names.setdefault(why, []).append(name)
    return {
        why: f"{first} and {len(more)} more" if more else first
        for why, (first, *more) in names.items()
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _of_gradients(c: Certificate) -> list[str]:
    if c.errors is None:
        if c.exact and c.exact == c.graphs:
            return ["nothing rounded, so no gradient compared"]
        return ["no gradient compared yet"]
    e = c.errors
    bias = (
        "" if c.bias is None else f", worst common to all looks {c.bias.worst:.2%} ({c.bias.name})"
    )
    known = [f"noise of the batch: {c.noise.median:.0%}"] if c.noise else []
    known += [f"rounding without hot: {c.rounding.median:.2%}"] if c.rounding else []
    beside = f" ({', '.join(known)})" if known else ""
    first = c.looks[0].errors
    before = f"; at the first look worst {first.worst:.2%} ({first.name})" * (len(c.looks) > 1)
    return [
        f"gradients within {e.median:.2%} of exact by median{beside}",
        f"worst {e.worst:.2%} ({e.name}{before}){bias}",
    ]


def certificate(step: Monitor | Callable[..., Any]) -> Certificate:
    """What the looks at ``step`` found so far.

    Args:
        step: what ``torch.compile(..., backend="hot")`` returned, a module that was compiled in
            place so, or its monitor, if it was given one.

    Raises:
        TypeError: ``step`` is not compiled so, was not called yet, or is not looked at.
    """
    monitor = step if isinstance(step, Monitor) else _monitor_behind(step)
    if monitor is None:
        raise TypeError(
            f"got a {type(step).__name__} that nothing looks at; expected what torch.compile(..., "
            'backend="hot") returned, after its first step, without accept="off". Compile it '
            f"so, or pass its monitor{_looked_at_inside(step)}."
        )
    for graph in monitor.graphs:
        graph.conclude()
    gauges = [graph.gauge for graph in monitor.graphs]
    decisions = [d for gauge in gauges for d in gauge.decisions]
    named = list(zip(gauges, _names(gauges), strict=True))
    judged = [(gauge.judged, names) for gauge, names in named]
    traces = {names[n]: trace for found, names in judged for n, trace in found.items()}
    noise = {name: t.noise for name, t in traces.items() if t.noise is not None}
    rounding = {name: t.rounding for name, t in traces.items() if t.rounding}
    bias = {name: t.bias for name, t in traces.items() if t.bias is not None}
    off = {
        names[n]: why for found, names in judged for n, why in faults(found, monitor.budget).items()
    }
    return Certificate(
        layers=len(decisions),
        on_integers=sum(d.strategy is not Strategy.EXACT for d in decisions),
        errors=Spread.of({name: t.error for name, t in traces.items()}),
        noise=Spread.of(noise),
        bias=Spread.of(bias),
        off=off,
        looks=tuple(monitor.history),
        compiles=monitor.compiles,
        graphs=len(gauges),
        exact=sum(gauge.exact for gauge in gauges),
        repaired={**monitor.forwards, **monitor.demoted, **monitor.stored, **monitor.raised},
        unseen={**getattr(monitor, "unseen", {}), **_unseen(named)},
        times=dict(getattr(monitor, "times", {})),
        rounding=Spread.of(rounding),
    )


def _names(gauges: Sequence[Gauge]) -> list[dict[str, str]]:
    """Of each graph's parameters: blocks may have some of the same names, and each counts."""
    known = [dict.fromkeys((*gauge.trained, *gauge.traces)) for gauge in gauges]
    counts = Counter(name for names in known for name in names)
    return [
        {name: f"{name} of graph {number}" if counts[name] > 1 else name for name in names}
        for number, names in enumerate(known)
    ]


def _unseen(named: Sequence[tuple[Gauge, Mapping[str, str]]]) -> dict[str, str]:
    """What of the graphs could not be looked at, and why; with each, its parameters' names."""
    found: dict[str, str] = {}
    for number, (gauge, names) in enumerate(named):
        if gauge.problem is not None:
            found[f"graph {number}"] = gauge.problem
            continue
        if gauge.exact:
            continue
        missing = [n for n in gauge.trained if n not in gauge.traces or not gauge.traces[n].looks]
        if not gauge.backwards or (gauge.shortage and not missing):
            before = _SETTLED if gauge.settled else "no watched step had a backward yet"
            found[f"graph {number}"] = gauge.shortage or before
        elif gauge.shortage:
            part = f"{len(missing)} of {len(gauge.trained)} parameters of graph {number}"
            found[f"{part}, {missing[0]} the first"] = gauge.shortage
        else:
            why = "its gradient is sparse, not finite, zero, or not this graph's"
            small = "its gradient is less than fp32 can add to the largest"
            found |= {names[name]: why for name in missing}
            found |= {names[name]: small for name in sorted(gauge.too_small)}
    return found


def _looked_at_inside(step: Any) -> str:
    """Parts of a module that were compiled by themselves; those that are alike share one's code."""
    parts = step.named_modules() if isinstance(step, nn.Module) else ()
    found = [name for name, part in parts if part is not step and _monitor_behind(part)]
    return f", or a part that was compiled by itself: {', '.join(map(repr, found))}" * bool(found)


def _monitor_behind(step: Any) -> Monitor | None:
    """The monitor among the options that a callable was compiled with."""
    in_place = getattr(step, "_compiled_call_impl", None)
    called = step.forward if isinstance(step, OptimizedModule) else in_place or step
    context = inspect.getclosurevars(called).nonlocals if inspect.isfunction(called) else {}
    if "callback" not in context:
        return None
    backend = innermost_backend(context["callback"])
    if KEPT_AS in vars(backend):
        return vars(backend)[KEPT_AS]
    for given in (backend, getattr(backend, "compiler_fn", None)):
        keywords = getattr(given, "kwargs", None) or getattr(given, "keywords", {})
        monitor = (keywords.get("options") or {}).get("monitor")
        if isinstance(monitor, Monitor):
            return monitor
    return None
