"""Opt-in watch on gradient quality: now and then, how far each gradient of a step is from exact.

    monitor = hot_compile.Monitor(path="quality.jsonl", budget=0.25)
    step = torch.compile(model, backend="hot", options={"monitor": monitor})

A watched step is a usual one, beside whose backward an exact twin of it runs (``watching``). Told
are what each layer's own strategy loses, and how far the gradient of every parameter is from exact
in the step as it ran, stored activations included. Where that leaves the budget the next step is
watched, too, with every layer and all that is stored for the backward. What is found to blame is
done more exactly from then on: the graph is compiled once more for all of it together.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hot_compile import parsers
from hot_compile.config import HotConfig, Memory, Strategy
from hot_compile.errors import OptionError
from hot_compile.observing.evidence import Spread, faults
from hot_compile.observing.raising import (
    Stored,
    affordable,
    amplification,
    bits_by_tensor,
    costliest,
    exact_products,
    raised_bits,
    strategy_in,
)

if TYPE_CHECKING:
    from hot_compile.observing.gauge import Gauge, Watched
    from hot_compile.observing.step_clock import StepClock
    from hot_compile.passes.storage.step_time import StepTime

log = logging.getLogger("hot_compile")

KEPT_AS = "hot_acceptance"
"""Where what ``torch.compile`` makes of a step keeps what looks at it by default."""
DOUBLING = "doubling"
_LAST_DOUBLED = 64
_SETTLED = 7
"""Looks at a graph, 1 to 64, after which a line says what was found."""
_ATTEMPTS = 3
"""Repairs of single layers and tensors that are tried before those of all of a graph."""
_TURNS = 5
"""So many shares of the budget are tried, each half of the one before, until one of them takes
more."""
_NAMED = 4
"""Most layers or tensors of a repair that are named in warnings."""
_FORWARD = "runs with an exact forward"
_FINER: Mapping[str, Mapping[str, Any]] = {
    _FORWARD: {"forward": "exact"},
    "stores activations in 8 bits": {"forward": "exact", "memory_bits": 8},
    "stores activations exactly": {"forward": "exact", "memory": Memory.OFF},
}
"""Rungs towards an exact graph: what is said of it, and the options that they change. With the last
one all layers are exact, too."""
_LAST = "stores activations exactly"
AS_STOCK = "is compiled as stock Inductor compiles it"
"""Behind the last rung: what is wrong is none of what is known to round."""
_LOST_FOR_GOOD = (
    "its gradients were not finite where exact ones were, and now nothing is: the parameters are "
    "lost. Start again; the next run is compiled so from its first step"
)


@dataclasses.dataclass(frozen=True)
class Quality:
    """One gradient of one layer against exact."""

    error: float
    """Norm of the difference over the norm of the exact gradient."""
    cosine: float

    @property
    def snr(self) -> float:
        """Signal to noise ratio, in dB."""
        return math.inf if self.error == 0 else -20 * math.log10(self.error)


WHOLE = "weight.grad"
"""The side of a layer that is its weight's gradient in the step as it ran."""

OWN = frozenset({"g_x", "g_w"})
"""The sides that tell what a layer's own strategy loses."""

Qualities = Mapping[str, Mapping[str, Quality]]
"""{layer: {"g_x" or "g_w": of its own strategy alone, "weight.grad": of the whole step}}, and
{parameter: {"grad": of the whole step}} for what is no layer's weight."""


@dataclasses.dataclass(frozen=True)
class Look:
    """What one look at one graph found, in short."""

    step: int
    """Forwards of the graph's present code."""
    compiles: int
    """How often graphs had been compiled."""
    errors: Spread
    """Of the parameters' gradients, relative to exact."""
    off: int
    """Parameters and layers that left the budget."""


@dataclasses.dataclass
class Monitor:
    """What to watch and where to tell it: give one to option ``monitor``."""

    every: int | str = DOUBLING
    """Watch every so many forwards of a graph; "doubling": the first, second, fourth, ... 64th, and
    then every 64th. That begins anew when a graph is compiled again."""
    budget: float | None = None
    """Relative error that a gradient may have, or, where that is more, 0.3 of what it differs from
    batch to batch. What is to blame for more is done more exactly: a layer's own g_x or g_w becomes
    exact if it takes more than the budget, tensors are stored in more bits whose storing takes more
    than its share of it. If there is none: the graph's forward becomes exact, its activations are
    stored in 8 bits, then exactly, and then all layers become exact. None: only watch."""
    rotate: int = 4
    """Measure the strategies of every so many layers per watched step, all of them in turn; 1: all
    at once. Whole errors are measured each time."""
    path: str | Path | None = None
    """File to append a JSON line to per watched step."""
    writer: Any = None
    """A TensorBoard ``SummaryWriter``, or anything with its ``add_scalar(name, value, step)``."""
    callback: Callable[[int, Qualities], None] | None = None
    """Called with (forwards so far, qualities)."""
    demoted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers that left the budget, with what they measured; ``*`` stands for all. "g_w: ..." says
    that g_w alone is exact, and likewise "g_x: ..."."""
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose graph stores its activations more exactly because of them, how, and why."""
    raised: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that are stored in more bits, by their names in a profile: how many, and why."""
    forwards: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose forward stays exact though the others' are on INT8, and why."""

    sums: ClassVar[bool] = False
    """A look takes a step's backwards together, as far as their gradients are summed."""

    def __post_init__(self) -> None:
        self.graphs: list[Watched] = []
        """Each graph's present code, with what was seen of it."""
        self.history: list[Look] = []
        """All looks so far, first to last."""
        self.compiles = 0
        """Graphs compiled so far, each time counted."""
        self._said = False
        if self.every != DOUBLING:
            parsers.at_least(1, or_else=DOUBLING)("every", self.every)
        parsers.at_least(1)("rotate", self.rotate)
        parsers.error_budget("budget", self.budget)
        parsers.path("path", self.path)
        if self.writer is not None and not callable(getattr(self.writer, "add_scalar", None)):
            raise OptionError.value("writer", self.writer, "an object with add_scalar, or None")
        if self.callback is not None and not callable(self.callback):
            expected = "a function of (forwards so far, qualities), or None"
            raise OptionError.value("callback", self.callback, expected)
        if not isinstance(self.demoted, dict):
            raise OptionError.value("demoted", self.demoted, "a dict {layer: why}")
        try:
            list(bits_by_tensor(self.raised))
        except (AttributeError, ValueError):
            expected = "a dict {tensor: '8 bits: why' or 'exact: why'}, as another Monitor has it"
            raise OptionError.value("raised", self.raised, expected) from None

    def applied(self, config: HotConfig, names: Sequence[str | None]) -> HotConfig:
        """The configuration for the graph of these parameters, after what was found so far."""
        layers = {layer_of(name) for name in names if name}
        reached = {self.stored[name].split(":")[0] for name in self.stored.keys() & layers}
        for rung, change in _FINER.items():  # each goes further than the one before
            if rung in reached or (rung == _LAST and reached - _FINER.keys()):
                config = dataclasses.replace(config, **change)
        exact = tuple((name, strategy_in(why)) for name, why in self.demoted.items())
        bits = (*config.memory_override, *bits_by_tensor(self.raised))
        forwards = (*config.forward_exact, *self.forwards)
        override = (*config.override, *exact)
        return dataclasses.replace(
            config, override=override, memory_override=bits, forward_exact=forwards
        )

    def due(self, forwards: int, settled: bool = False) -> bool:
        """The forward of this number, from 1 on, of a graph's present code is to be watched.

        ``settled``: looks at such code, in an earlier process, found no fault.
        """
        if isinstance(self.every, int):
            return forwards % self.every == 0
        if forwards > _LAST_DOUBLED:
            return forwards % _LAST_DOUBLED == 0
        return forwards & (forwards - 1) == 0

    def report(
        self, step: int, found: Qualities, stored: Mapping[str, Stored] | None = None
    ) -> None:
        """Tell every sink what was found.

        A failing sink is logged and dropped: watching must not stop a training run.

        Args:
            step: forwards so far. found: what was seen since the last call.
            stored: what crosses to the backward, if that was measured.
        """
        to_file = functools.partial(self._to_file, stored=stored or {})
        for sink in (to_file, self._to_writer, self.callback):
            if sink is None:
                continue
            try:
                sink(step, found)
            except Exception:
                log.warning("hot: monitor could not report step %d", step, exc_info=True)

    def faults(self, found: Qualities, gauge: Gauge) -> dict[str, str]:
        """What left the budget: layers by their own strategy, parameters by the whole error."""
        if self.budget is None or (gauge.as_stock if self.sums else self._is_exact(gauge)):
            return {}
        own = {name: exact_products(off, None) for name, off in self._own(found, 1.0).items()}
        return {**own, **faults(gauge.judged, self.budget)}

    def repair(
        self, step: int, found: Qualities, stored: Mapping[str, Stored], gauge: Gauge
    ) -> bool:
        """Change how the graph is to be compiled, in all that is to blame for its faults at once.

        What takes more memory is done as far as there is memory left at a step's peak. False:
        nothing changes.

        Args:
            step, found, stored: as for :meth:`report`; of every layer and tensor.
            gauge: what the looks at the graph showed.
        """
        assert self.budget is not None
        whole = gauge.errors
        of = f"whole error of {whole.name} {whole.worst:.3g}, " if whole else ""
        why = f"{of}budget {self.budget:g}, at step {step}"
        products = {n: sides["g_w"].error for n, sides in found.items() if "g_w" in sides}
        times = amplification(products)
        in_vain = gauge.repaired_in_vain
        if gauge.lost and not found:
            return self._take_rung(gauge, AS_STOCK, f"{_LOST_FOR_GOOD}; {why}")
        if gauge.lost and stored and _parts(found, stored) <= self.budget:
            return self._take_rung(gauge, AS_STOCK, f"nothing that was rounded explains the {why}")
        if gauge.attempts < _ATTEMPTS and whole and not in_vain:
            unknown = not stored and gauge.config.memory is not Memory.OFF  # memory was too short
            rounded = self._leave(gauge, why)  # what is left of the whole is not known then
            parts = _share(whole.worst, found, stored, times)
            parts = 1.0 if unknown or rounded else parts
            turns = 1 if unknown or rounded or self._heads(gauge) else _TURNS
            for halves in range(gauge.attempts, gauge.attempts + turns):  # until some are to blame
                share = parts * 0.5**halves
                new = self._demote(step, found, share, times)
                wanted = raised_bits(stored, self.budget * share, self.raised, times)
                raised = self._raise(wanted, stored, why, gauge.room())
                if wanted or new or rounded:
                    return raised or new or rounded
        return self._refine(gauge, why, in_vain)

    def _own(
        self, found: Qualities, share: float, times: float = 1.0
    ) -> dict[str, dict[str, float]]:
        """Errors of layers' own products that leave a share of the budget, by side; that of g_x
        counts so many ``times``."""
        most = math.inf if self.budget is None else self.budget * share
        limits = {"g_x": most / times, "g_w": most}
        own = {
            name: {s: q.error for s, q in sides.items() if q.error > limits.get(s, math.inf)}
            for name, sides in found.items()
            if strategy_in(self.demoted.get(name, "g_w:")) is not Strategy.EXACT
        }
        return {name: off for name, off in own.items() if off}

    def _demote(self, step: int, found: Qualities, share: float, times: float) -> bool:
        """Make products of layers exact that leave a share of the budget."""
        new = self._own(found, share, times)
        for name, off in new.items():
            of = "" if share == 1 else f"{share:.2g} of "
            why = exact_products(off, self.demoted.get(name))
            why += f", counted {times:.3g} times," if "g_x" in off and times > 1 else ""
            self.demoted[name] = f"{why} over {of}budget {self.budget:g} at step {step}"
        _warn("stays exact", {name: self.demoted[name] for name in new})
        return bool(new)

    def _raise(
        self, wanted: Mapping[str, str], stored: Mapping[str, Stored], why: str, room: float
    ) -> bool:
        """Give tensors the bits that are wanted, as far as there is room."""
        new = affordable(wanted, stored, room)
        for name, text in new.items():
            self.raised[name] = f"{text}; {why}"
        _warn("is stored more finely", {name: self.raised[name] for name in new})
        if len(new) < len(wanted):
            _too_little(f"{len(wanted) - len(new)} tensors are not stored more finely", room)
        return bool(new)

    def _leave(self, gauge: Gauge, why: str) -> bool:
        """Leave INT8 forwards exact that do most to the loss, until the rest is within the budget
        if the forward alone is to blame for the whole error.

        Once: what is off then, though the rest of the forward does little to the loss, is off
        by something else.
        """
        assert self.budget is not None
        lost = {} if gauge.attempts else gauge.read_forwards()
        kept = [t.limit(self.budget) / t.error for t in gauge.judged.values() if t.error]
        new = costliest(lost, min([1.0, *kept]) ** 2)
        self.forwards.update(dict.fromkeys(new, f"exact forward: {why}"))
        _warn("has an exact forward", {name: self.forwards[name] for name in new})
        return bool(new)

    def _heads(self, gauge: Gauge) -> list[str]:
        """Heads with integer products, which are blamed where no layer or tensor is."""
        return [name for name in gauge.heads if name not in self.demoted]

    def _refine(self, gauge: Gauge, why: str, in_vain: bool = False) -> bool:
        """Nobody alone is to blame: its head, then the next rung towards exact for the graph.

        ``in_vain``: finer storage of what loses most changed nothing, so that of all would not.
        """
        heads = dict.fromkeys(self._heads(gauge), why)
        if heads:
            self.demoted.update(heads)
            _warn("stays exact", heads)
            return True
        changes = (
            text
            for text, change in _FINER.items()
            if _changes(gauge.config, change) and not (in_vain and "memory_bits" in change)
        )
        last = AS_STOCK if self._is_exact(gauge) else _LAST
        return self._take_rung(gauge, next(changes, last), why)

    def _take_rung(self, gauge: Gauge, rung: str, why: str) -> bool:
        """Towards exact with all of a graph, unless memory is too short for that."""
        room = gauge.room()
        if rung != _FORWARD and gauge.exact_more > room:
            _too_little(f"no graph that {rung}", room)
            return False
        self.stored.update(dict.fromkeys(gauge.names, f"{rung}: {why}"))
        if rung == _LAST:
            self.demoted.update(dict.fromkeys(gauge.layers, why))
        log.warning("hot: a graph %s from now on: %s", rung, why)
        return True

    def _is_exact(self, gauge: Gauge) -> bool:
        """A graph was compiled with the last rung; others may have layers of the same names."""
        reached = (self.stored.get(name, "").startswith((_LAST, AS_STOCK)) for name in gauge.names)
        return any(reached) and not _changes(gauge.config, _FINER[_LAST])

    def watches(self, graph: Watched) -> Watched:
        """A graph was compiled: ``graph``, which is returned, is what runs from now on."""
        before = graph.replaced(self.graphs)
        if before is not None:
            graph.gauge.attempts = before.gauge.attempts + before.gauge.repaired
            graph.steps = before.steps
            graph.gauge.repairs = before.gauge.repairs + before.gauge.repaired
            graph.gauge.before = before.gauge.wrong
            self.graphs.remove(before)
        self.graphs.append(graph)
        self.compiles += 1
        return graph

    def wakes(self, forwards: int, settled: bool) -> bool:
        """At the forward of this number there may be something to do: a look, to begin with."""
        return self.due(forwards, settled)

    def follows(self, gauge: Gauge, forwards: int) -> bool:
        """Others decided how the graph is to be compiled; of a monitor nobody else does."""
        return False

    def settles(self, gauge: Gauge) -> None:
        """A look at a graph found no fault."""

    def timed(self, clock: StepClock, gauge: Gauge, differs: Callable[[StepTime], bool]) -> bool:
        """Steps of which a graph is a part were timed; whether it is to be compiled again by that.

        ``differs``: whether it comes out otherwise if a step takes so long.
        """
        return False

    def overdue(self, gauge: Gauge, differs: Callable[[StepTime], bool]) -> bool:
        """What ``timed`` told is to be followed now."""
        return False

    @property
    def busy(self) -> bool:
        """Some graph was not looked at yet, or is being repaired, as far as is known now."""
        for graph in self.graphs:
            graph.conclude()
        gauges = [graph.gauge for graph in self.graphs]
        waits = (g.repaired or g.wants_stored or g.doubts for g in gauges)
        return any(waits) or any(not (g.looks or g.problem or g.exact) for g in gauges)

    def settled(self) -> bool:
        """All graphs were looked at as often as a line at the end needs; True once."""
        gauges = [graph.gauge for graph in self.graphs]
        if self._said or any(g.looks < _SETTLED and not g.exact for g in gauges):
            return False
        self._said = True
        return True

    def _to_file(self, step: int, found: Qualities, stored: Mapping[str, Stored]) -> None:
        if self.path is None:
            return
        line: dict[str, Any] = {"step": step}
        layers = {
            name: {side: dataclasses.asdict(quality) for side, quality in sides.items()}
            for name, sides in found.items()
        }
        line["layers"] = layers
        if stored:
            line["stored"] = {name: dataclasses.asdict(seen) for name, seen in stored.items()}
        with Path(self.path).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _to_writer(self, step: int, found: Qualities) -> None:
        if self.writer is None:
            return
        for name, sides in found.items():
            for side, quality in sides.items():
                self.writer.add_scalar(f"hot/{side} cosine/{name}", quality.cosine, step)
                self.writer.add_scalar(f"hot/{side} SNR/{name}", quality.snr, step)


def _share(whole: float, found: Qualities, stored: Mapping[str, Stored], times: float) -> float:
    """Share of the budget by which layers and tensors are judged, one by one.

    Where gradients' sums nearly cancel, the error of the whole is many times that of each part,
    more than the ``times`` that are known of.
    """
    return min(1.0, times * _parts(found, stored) / whole) if whole else 1.0


def _parts(found: Qualities, stored: Mapping[str, Stored]) -> float:
    """The worst that one layer's products, or storing one tensor, do to a gradient."""
    own = [q.error for sides in found.values() for side, q in sides.items() if side in OWN]
    return max([*own, *(tensor.lost for tensor in stored.values())], default=0.0)


def layer_of(parameter: str) -> str:
    """The layer whose weight it is, if it is one."""
    return parameter.removesuffix(".weight")


def _warn(what: str, reasons: Mapping[str, str]) -> None:
    """Of each by its name, but of the first few only: a repair may be of every layer."""
    for name, why in list(reasons.items())[:_NAMED]:
        log.warning("hot: %s %s from now on: %s", name, what, why)
    if len(reasons) > _NAMED:
        more = len(reasons) - _NAMED
        log.warning("hot: and so it is with %d more, which the monitor lists", more)


def _too_little(what: str, room: float) -> None:
    """A repair would take more memory than there is."""
    log.warning(
        "hot: gradients stay less exact than wanted: %s, since a step leaves %.0f MiB at its peak. "
        "A smaller batch, or option memory_override for some of them, makes room.",
        what, max(0.0, room) / 2**20,
    )  # fmt: skip


def _changes(config: HotConfig, change: Mapping[str, Any]) -> bool:
    """The change would compute or store anything more exactly."""
    if config.forward != "exact":
        return True
    if config.memory is Memory.OFF:
        return False
    return "memory" in change or (config.memory_bits or 0) < change.get("memory_bits", 0)


def monitor_of(options: Mapping[str, Any]) -> Monitor | None:
    """Option ``monitor``, if there is one.

    Raises:
        OptionError: it is no Monitor.
    """
    monitor = options.get("hot.monitor", options.get("monitor"))
    if monitor is not None and not isinstance(monitor, Monitor):
        raise OptionError.value("monitor", monitor, "a hot_compile.Monitor(...), or None")
    return monitor
