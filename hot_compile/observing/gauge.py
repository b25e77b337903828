"""What a monitor is shown of one compiled graph, and when."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hot_compile.again import hooked
from hot_compile.config import BASELINES, HotConfig, Strategy
from hot_compile.observing.certificate import certificate
from hot_compile.observing.evidence import Spread, Trace, judged
from hot_compile.observing.forgetting import forget
from hot_compile.observing.monitor import WHOLE, Look, Monitor, Qualities, Quality, layer_of
from hot_compile.observing.raising import Stored
from hot_compile.observing.step_clock import StepClock
from hot_compile.observing.steps import Steps
from hot_compile.observing.watching import Watch
from hot_compile.passes.layers.decision import Decision
from hot_compile.passes.measure.conv import exact_conv_gradients, quantised_conv_gradients
from hot_compile.passes.measure.linear import (
    compare,
    compare_product,
    exact_grad_weight,
    forward_loss,
    quantised_grad_input,
    quantised_grad_weight,
)
from hot_compile.passes.measure.observe import SAME, Layer, Observer
from hot_compile.passes.measure.stored import LOST, Fed, Quiet
from hot_compile.passes.plan import Plan
from hot_compile.passes.storage.record import Crossing
from hot_compile.passes.storage.step_time import StepTime

log = logging.getLogger("hot_compile")

_UNTOUCHED = BASELINES | {Strategy.EXACT}
_SAME_ERROR = 0.02
"""An error that changes by less than this share of it has not changed."""
_FORWARDS = 8
"""Most forwards of a look: a step may call a graph several times."""
Differs = Callable[[Sequence[Any], StepTime], bool]
"""(inputs of a graph, how long a step takes) -> whether that changes how it is compiled."""
_PATIENCE = 64
"""Forwards that a look waits for one that begins a step."""
_AHEAD = 64
"""For so many forwards it is trusted that none is due: a monitor may be told otherwise."""


class Gauge(Observer):
    """Measures gradients and each layer's own strategy, and reads nothing back before asked.

    With ``wants_stored``: all layers at once, and what storing each tensor does, too.
    """

    def __init__(
        self,
        rotate: int = 1,
        config: HotConfig | None = None,
        trained: Iterable[str] = (),
        weights: Iterable[str] = (),
    ) -> None:
        """``rotate``: every so many layers take turns, from one :meth:`read` to the next.

        ``config``: how the graph was compiled. ``trained``: its parameters that want gradients.
        ``weights``: those that are matrices.
        """
        self.wants_stored = self.doubts = False
        self.rounds = False
        """What rounds in its graph is told without compiling anything."""
        self.config = config or HotConfig()
        self.trained = tuple(trained)
        self.traces: dict[str, Trace] = {}
        """By parameter: what the looks showed."""
        self.decisions: tuple[Decision, ...] = ()
        """What the plan says of every layer."""
        self.heads: tuple[str, ...] = ()
        """Heads with integer products, which no look shows one by one."""
        self.step: StepTime | None = None
        """What it says of the time that a step takes."""
        self.looks = 0
        """Watched backwards in which some gradient could be compared."""
        self.backwards = 0
        """Those that were watched at all."""
        self.attempts = 0
        """Repairs of this graph, the last ones, that were not enough."""
        self.before: Spread | None = None
        """What was wrong when the last of them was made; None once nothing is."""
        self.wrong: Spread | None = None
        """What it is to be repaired for."""
        self.repaired = False
        """It is to be compiled again."""
        self.path: Path | None = None
        """Where what is found is kept, by all that tells its graph from others."""
        self.repairs = 0
        """Of this graph so far, by this process."""
        self.settled = False
        """Its first looks, perhaps in an earlier process, found nothing."""
        self.exact = False
        """Nothing of its graph is rounded: its steps are timed, and there is nothing to compare."""
        self.as_stock = False
        """Its graph is compiled as stock compiles it: there is nothing left to repair."""
        self.room: Callable[[], float] = lambda: math.inf
        """Bytes of its devices that are free where a step's memory is highest."""
        self.exact_more = 0
        """Bytes that it takes more if all that it stores is stored exactly."""
        self.stuck = False
        """No repair fits into the memory."""
        self.shortage = ""
        """Why there was too little memory for all of the last look; empty if there was enough."""
        self._short = ""
        """As that, of a look that is not read yet."""
        self._weights = frozenset(weights)
        self._rotate = rotate
        self._places: dict[str, int] = {}
        self.layers: set[str] = set()
        """Names of the layers shown."""
        self._pending: list[tuple[str, str, Tensor]] = []
        self._sketches: dict[str, tuple[Tensor, Tensor]] = {}
        self._uncertain: dict[str, Tensor] = {}
        self._told: list[tuple[Fed, dict[str, Tensor]]] = []
        self._lost: dict[str, list[Tensor]] = {}

    def compiled(self, plan: Plan, crossing: Iterable[Crossing], room: Callable[[], float]) -> None:
        """Keep what was done to the graph, and what of the devices' memory steps leave."""
        self.exact_more = sum(c.bytes_before - c.bytes for c in crossing)
        self.room = room
        self.planned(plan.decisions)
        self.heads = tuple(head.name for head in plan.heads if head.int8)
        self.step = plan.step

    def planned(self, decisions: Sequence[Decision]) -> None:
        """Keep what the plan says of every layer."""
        self.decisions = tuple(decisions)

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Measure one layer, unless it is exact anyway."""
        d, forward = layer.decision, layer.forward
        self.layers.add(layer.name)
        if self.wants_stored and forward and x is not None and weight is not None:
            lost = forward_loss(g, x, weight, forward.rotated)
            self._lost.setdefault(layer.name, []).append(lost)
        if d is None or d.strategy in _UNTOUCHED:
            return
        place = self._places.setdefault(layer.name, len(self._places))
        period = 1 if self.wants_stored else min(self._rotate, len(self._places))
        if place % period != self.backwards % period:
            return
        with torch.no_grad():
            if layer.convolves:
                self._convolution(layer, d, g, weight, x)
                return
            if weight is not None and d.strategy is not Strategy.GW_ONLY:
                got = quantised_grad_input(g, weight, d.gx_bits, d.per_channel, d.per_token)
                self._keep(layer.name, "g_x", compare_product(got, g, weight))
                del got
            if x is not None and d.strategy is not Strategy.GX_ONLY:
                got = quantised_grad_weight(g, x, d.strategy, d.rank, d.tokens, d.per_channel)
                self._keep(layer.name, "g_w", compare(got, exact_grad_weight(g, x)))

    def _convolution(
        self, layer: Layer, d: Decision, g: Tensor, weight: Tensor | None, x: Tensor | None
    ) -> None:
        assert layer.site is not None
        assert weight is not None
        assert x is not None
        got = quantised_conv_gradients(layer.site, d, g, weight, x)
        want = exact_conv_gradients(layer.site, g, weight, x)
        for side, mine, theirs in zip(("g_x", "g_w"), got, want, strict=True):
            if mine is not None and theirs is not None:
                self._keep(layer.name, side, compare(mine, theirs))

    def _keep(self, name: str, side: str, figures: tuple[Tensor, Tensor]) -> None:
        self._pending.append((name, side, torch.stack(figures)))

    def gradient(self, name: str, got: Tensor, want: Tensor) -> None:
        """Keep one parameter's gradient, added to that of other forwards of the same step.

        Sketches are linear; sums are what the optimizer gets, and may cancel where parts do not.
        """
        known = self._sketches.get(name)
        self._sketches[name] = (known[0] + got, known[1] + want) if known else (got, want)

    def uncertain(self, name: str, difference: Tensor) -> None:
        """Keep what exact code of two kinds differs by, added to that of other forwards."""
        self._uncertain[name] = self._uncertain.get(name, 0) + difference

    @property
    def same(self) -> float:
        """As of an observer; how far an INT8 forward is off gradients show."""
        return SAME if self.config.forward == "exact" else math.inf

    def short(self, why: str) -> None:
        """Say it the first time."""
        if not self.shortage:
            log.warning("hot: no memory to compare gradients with exact ones: %s", why)
        self.shortage = f"memory was too short: {why.partition(chr(10))[0]}"
        self._short = self.shortage

    def stored(self, fed: Fed, operands: Sequence[Tensor]) -> None:
        """Measure what storing one tensor does, unless memory is too short for that."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._told.append((fed, fed.errors(operands)))

    def read_stored(self) -> dict[str, Stored]:
        """What crossed in the backwards since the last call, as far as that was measured."""
        told, self._told = self._told, []
        quiet = Quiet.of(trace.norm for trace in self.traces.values())
        return {
            fed.name: Stored(fed.scheme, fed.measures(errors, quiet), fed.held)
            for fed, errors in told
        }

    def read_forwards(self) -> dict[str, float]:
        """What INT8 forwards did to the loss since the last call, squared, by layer."""
        lost, self._lost = self._lost, {}
        return {name: sum(map(float, parts)) for name, parts in lost.items()}

    def read(self) -> Qualities | None:
        """What the backwards since the last call showed; what is not finite is left out.

        None if there were none. Waits for the device.
        """
        short, self._short = self._short, ""
        if not self._pending and not self._sketches:
            return None
        pending, self._pending = self._pending, []
        sketches, self._sketches = self._sketches, {}
        uncertain, self._uncertain = self._uncertain, {}
        self.backwards += 1
        found: dict[str, dict[str, Quality]] = {}
        for name, side, figures in pending:
            error, cosine = figures.tolist()
            if math.isfinite(error) and math.isfinite(cosine):
                found.setdefault(name, {})[side] = Quality(error, cosine)
        for name, (got, want) in sketches.items():
            trace = self.traces.setdefault(name, Trace())
            other = uncertain.get(name)
            if trace.add(got.cpu(), want.cpu(), None if other is None else other.cpu()):
                whose, side = (layer_of(name), WHOLE) if name in self._weights else (name, "grad")
                found.setdefault(whose, {})[side] = Quality(trace.error, trace.cosine)
        for name in self.too_small:
            found.get(layer_of(name), {}).pop("g_w", None)  # nobody is blamed for that
        if found:
            self.looks, self.shortage = self.looks + 1, short
        return found

    @property
    def names(self) -> frozenset[str]:
        """Of its layers, as a monitor has them, and of parameters that are no layer's weight."""
        return frozenset({*map(layer_of, self.trained), *self.layers})

    @property
    def judged(self) -> dict[str, Trace]:
        """Of the parameters that count, by name, as the last look has them."""
        return judged(self.traces, self._weights)

    @property
    def too_small(self) -> frozenset[str]:
        """Matrices that were looked at, with gradients that do not count."""
        looked = {name for name, trace in self.traces.items() if trace.looks}
        return self._weights & looked - self.judged.keys()

    @property
    def lost(self) -> bool:
        """Some gradient that counts is infinite, or NaN, where the exact one was not."""
        return any(trace.error == LOST for trace in self.judged.values())

    @property
    def errors(self) -> Spread | None:
        """Of the gradients that count at the last look; None before it."""
        return Spread.of({name: trace.error for name, trace in self.judged.items()})

    @property
    def repaired_in_vain(self) -> bool:
        """What was worst before the last repair is as wrong as it was: that was not to blame."""
        if self.before is None or self.before.name not in self.judged:
            return False
        error, was = self.judged[self.before.name].error, self.before.worst
        return abs(error - was) <= _SAME_ERROR * was


class Watched:
    """A compiled graph of which some forwards and backwards are watched, as its monitor says."""

    def __init__(
        self,
        usual: Callable[..., Any],
        observed: Watch,
        gauge: Gauge,
        monitor: Monitor,
        made_of: tuple[Any, ...] = (None,),
    ) -> None:
        """``observed`` computes the same as ``usual``, and shows it to ``gauge``.

        ``made_of``: the code that Dynamo compiled it of, and the ids of its trained parameters.
        """
        self._usual = usual
        self._observed = observed
        self.gauge = gauge
        self._monitor = monitor
        self._made_of = made_of
        self._dropped = False
        """Its code is to be compiled again."""
        self.clock: StepClock | None = None
        """Times some steps, of which the graph is a part, if that is wanted."""
        self.differs: Differs = lambda *_: True
        self._calls = 0
        self._idle = 0
        """Forwards up to which there is nothing to do but to run."""
        self._due = 0
        """The forward at which a look was due that waits for a step to begin; 0: none does."""
        self._left = 0
        """Forwards that are to be watched until there is a backward."""
        self.steps = Steps()
        """Go on where the graph is compiled again."""

    def __call__(self, *args: Any) -> Any:
        """One forward; what the last watched backward showed is read here."""
        if hooked() and torch._C._current_graph_task_id() != -1:  # a checkpoint computes it again
            return self._usual(*args)
        clock = self.clock
        if self._calls < self._idle and (clock is None or clock.wants_more):
            self._calls += 1
            return self._usual(*args) if clock is None else clock(self._usual, args, self.gauge)
        if not self._calls and any(isinstance(x, FakeTensor) for x in args):
            return self._usual(*args)  # DDP's pieces are traced, each with what is compiled of it
        with self._observed.telling("what a watched step showed could not be read"):
            if not self._goes_on(args):
                self.conclude()
        if clock is not None and not clock.wants_more:
            self._timed(clock, args)
        self._calls += 1
        gauge = self.gauge
        if not gauge.repaired and self._monitor.follows(gauge, self._calls):
            self._repaired()
        if not gauge.repaired and self._monitor.overdue(gauge, self._differing(args)):
            self._repaired()
        if self._monitor.due(self._calls, gauge.settled) and not (self._due or gauge.exact):
            self._due = self._calls
        if self._due and self._begins(args):
            self._due, self._left = 0, _FORWARDS
        watched = self._left > 0 and not gauge.repaired
        self._left -= watched
        if not watched and not (self._left or self._due or gauge.repaired):
            self._idle = self._next() - 2  # whether a step begins there shows the forward before
        # code that makes NaN runs once more while it is decided to drop it: its gradients are
        # replaced in this step, too
        run = self._observed if watched or gauge.lost else self._usual
        passed = run(*args) if self.clock is None else self.clock(run, args, gauge, not watched)
        self.steps.passed(passed, args)
        return passed

    def _begins(self, args: Sequence[Any]) -> bool:
        """A look that is due begins with a step, if one begins in time."""
        late = self._calls - self._due >= _PATIENCE
        return late or not self._monitor.sums or self.steps.begins(args)

    def _goes_on(self, args: Sequence[Any]) -> bool:
        """The step that is watched calls the graph again, and adds to the gradients that it has.

        They may cancel, and their sum is what an optimizer gets.
        """
        sums = self._left and self._monitor.sums and not self.gauge.shortage
        return bool(sums) and not self.steps.begins(args)

    def _next(self) -> int:
        """The next forward at which there may be something to do."""
        first, settled = self._calls + 1, self.gauge.settled
        ahead = range(first, first + _AHEAD)
        return next((n for n in ahead if self._monitor.wakes(n, settled)), ahead.stop)

    def conclude(self) -> None:
        """Read and judge what the last watched backwards showed, if there were any."""
        gauge = self.gauge
        self._observed.check_outputs()
        found = gauge.read()
        if found is not None:
            self._left = 0
        if found:
            self._judge(found)
        elif found is not None and gauge.lost and self._monitor.faults(found, gauge):
            self._repair({}, {})  # not even exact gradients are finite any more
        elif self._left and gauge.shortage:
            self._left = 0
            if gauge.wants_stored and not gauge.repaired:  # a fault that nothing can be told of
                self._repair({}, {})

    def _timed(self, clock: StepClock, args: Sequence[Any]) -> None:
        """Read the clock, which has run out."""
        found = clock.read()
        if found is None and not clock.vain:
            return
        self.clock = None
        waits = found is not None and not self.gauge.repaired
        if waits and self._monitor.timed(clock, self.gauge, self._differing(args)):
            self._repaired()

    def _differing(self, args: Sequence[Any]) -> Callable[[StepTime], bool]:
        return functools.partial(self.differs, args)

    def _judge(self, found: Qualities) -> None:
        """Report; before anything is changed all is looked at that may be to blame."""
        gauge, monitor, step = self.gauge, self._monitor, self._calls
        stored, faults = gauge.read_stored(), monitor.faults(found, gauge)
        monitor.report(step, found, stored)
        errors = gauge.errors
        if errors is not None:
            monitor.history.append(Look(step, monitor.compiles, errors, len(faults)))
        if not faults:
            gauge.attempts, gauge.wants_stored, gauge.doubts = 0, False, False
            gauge.before = None
            monitor.settles(gauge)
        elif gauge.wants_stored:
            self._repair(found, stored)
        elif not gauge.stuck:
            gauge.wants_stored, gauge.doubts = gauge.doubts or not gauge.rounds, True
            self._due = self._calls + 1
        if not gauge.wants_stored and monitor.settled():
            log.warning("hot: %s", certificate(monitor))

    def _repair(self, found: Qualities, stored: Mapping[str, Stored]) -> None:
        gauge = self.gauge
        gauge.wants_stored = False
        if self._monitor.repair(self._calls, found, stored, gauge):
            gauge.wrong = gauge.errors
            self._repaired()
        else:
            gauge.stuck = True

    def _repaired(self) -> None:
        """The next forward compiles the graph anew."""
        self.gauge.repaired, self.gauge.wants_stored = True, False
        code = self._made_of[0]
        for graph in self._monitor.graphs:
            graph._dropped = graph._dropped or code in (None, graph._made_of[0])
        forget(code)

    def replaced(self, graphs: Sequence[Watched]) -> Watched | None:
        """Which of ``graphs`` it takes the place of: of the same code and parameters, or else the
        same graph, of which the code was dropped: layers that share it may come in another order.

        Code alone does not tell: a graph break in a block leaves a graph for each.
        """
        same = [old for old in graphs if old._made_of == self._made_of]
        code, path = self._made_of[0], self.gauge.path
        dropped = [old for old in graphs if old._dropped and old._made_of[0] == code]
        return next(iter(same + [old for old in dropped if old.gauge.path == path]), None)
