"""``hot-compile certify script.py``: some steps by "hot", looked at, then beside stock, in turns.

The script runs once in this process, and is ended after enough of its optimizer's steps. Its graphs
are compiled in several ways. Which of them runs changes between steps, back and forth, so that what
else the machine does falls on all alike. Where "hot" is slower, it is tried without each of its
parts, too.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from rich.console import Console
from torch import fx
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from torch.optim.optimizer import register_optimizer_step_post_hook

from .again import trains, twin
from .backend import hot
from .config import HotConfig, split_options
from .guarantee import PARTS, Part, stores
from .launch import by_default, ended, starting
from .memory import risen
from .observing.acceptance import Findings, path_of
from .observing.auto import code_being_compiled
from .observing.certificate import Certificate, Ran, certificate
from .observing.forgetting import forget
from .observing.monitor import Monitor
from .record import GraphReport
from .sizes import memory_text, time_text
from .stock import inductor
from .tables import PlainTable

_WARM = 3
"""Steps of each way that are not measured: its code is compiled and tuned in them."""
_ROUNDS = 6
"""Turns that each way has at least, if so many steps are measured."""
_SURELY = 5
"""Turns, one way longer than the other in each of them, that are no chance."""
_LONGEST = 4
"""Looks go on for at most so many times the steps asked for, while something is being repaired."""
_SAME = 0.01
"""Relative difference of step times that is none."""
_SMALLER = 0.95
"""Peaks below this share of stock's are smaller."""
_NEVER = sys.maxsize
HOT, STOCK = "hot", "stock"
Over = Mapping[str, Any]
"""Options that lie over others."""
_PARTS = (
    Part("storage that takes time", {"memory": "free"}, stores),
    *PARTS,
    Part("a head on INT8", {"head": "chunked"}, lambda r: any(h.int8 for h in r.plan.heads)),
    Part("integer products", {"strategies": ["exact"]}, lambda r: bool(r.plan.rewritten)),
    Part("exact forms", {"exact_forms": False}, lambda r: any(f.taken for f in r.plan.exact_forms)),
)


class _Enough(SystemExit):
    """Ends the script: no ``except Exception`` of its own is to stop that."""


class Turns:
    """A backend that compiles each graph in several ways, of which one runs at a time."""

    def __init__(self, options: Mapping[str, Any], monitor: Monitor) -> None:
        self._options, self._monitor = options, monitor
        self._codes: set[CodeType | None] = set()
        self.ways: dict[str, Over | None] = {HOT: {}}
        """By name: the options laid over the user's; None: stock Inductor."""
        self.now = HOT
        """Which of them runs."""
        self.asked: dict[Path, dict[str, Any]] = {}
        """By where findings of a graph are kept: the user's options, and what was found before."""
        self.reports: list[GraphReport] = []
        """Of graphs by "hot", but those from Inductor's cache."""
        self.reset = reset_cudagraph_trees  # torch.compiler.reset() calls it, as the backend's own

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """One graph, in all ways."""
        self._codes.add(code_being_compiled())
        given = {**(options or {}), **self._options}
        if trains(example_inputs):
            path = path_of(gm, example_inputs, mode, given)
            known = Findings() if given.get("accept") == "off" else Findings.load(path)
            given |= known.lighter
            self.asked[path] = given
        codes = {}
        for name, over in self.ways.items():
            own = twin(gm), example_inputs
            if over is None:
                codes[name] = inductor(*own, mode=mode, options=given)
                continue
            asked = {**given, **over, "monitor": self._monitor}
            listener = self.reports.append if name == HOT else None
            codes[name] = hot(*own, mode=mode, options=asked, listener=listener)
        return lambda *args: codes[self.now](*args)

    def also(self, ways: Mapping[str, Over | None]) -> None:
        """From the next step on graphs are compiled in these ways, too."""
        self.ways |= ways
        for code in self._codes:
            forget(code)
        self._codes.clear()

    def parts(self) -> dict[str, Over]:
        """By name: options that leave out a part which did something. Budgets are kept."""
        found = {}
        for part in _PARTS:
            if self.reports and not any(map(part.used, self.reports)):
                continue
            if any(_changes(given, part.without) for given in self.asked.values()):
                found[part.name] = part.without
        return found

    def remember(self, over: Mapping[str, Any], because: str) -> None:
        """The next runs begin with these options, too."""
        for path in self.asked:
            known = Findings.load(path)
            lighter = json.loads(json.dumps({**known.lighter, **over}))
            new = dataclasses.replace(known, lighter=lighter, because=because, settled=False)
            new.save(path)


def _changes(given: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Options change something and take no budget of the user's away."""
    ours, _ = split_options(given)
    config = HotConfig.from_options(ours)
    budget = config.has_budget and "memory" in over
    return config.accept != "off" and not budget and config.changed(over) != config


class Session:
    """Counts a script's steps by its first optimizer, changes ways between them, then ends it."""

    def __init__(self, turns: Turns, monitor: Monitor, steps: int) -> None:
        self._turns, self._monitor, self._steps = turns, monitor, steps
        self._optimizer: torch.optim.Optimizer | None = None
        self._before = _allocated()
        self._course = self._whole()
        self.done = 0
        """Steps so far."""
        self.found: Certificate | None = None
        """What looks found, once there were enough."""
        self.ran: dict[str, Ran] = {}
        """How steps ran, by way."""

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After each step of an optimizer."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self.done += 1
        try:
            next(self._course)
        except StopIteration:
            raise _Enough from None

    def drive(self, start: Callable[[], Any]) -> int:
        """Run a script until it is enough, or it ends; its exit code."""
        hook = register_optimizer_step_post_hook(self)
        try:
            return ended(start)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            hook.remove()
            self._course.close()

    def _whole(self) -> Generator[None]:
        """All of it; each ``yield`` is a step of the script's."""
        while self.done < self._steps or (
            self._monitor.busy and self.done < _LONGEST * self._steps
        ):
            yield
        self._monitor.every = _NEVER
        self.found = certificate(self._monitor)
        _tell(f"by hot and by stock Inductor in turns, {self._steps} steps each")
        yield from self._measured({STOCK: None}, HOT)
        if not slower(self.ran[HOT], self.ran[STOCK]):
            return
        parts = self._turns.parts()
        _tell(f"hot is slower here; the same without each of its {len(parts)} parts")
        yield from self._measured(parts, HOT, STOCK)
        wins = [p for p in parts if slower(self.ran[HOT], self.ran[p])]
        if len(wins) > 1 and not _as_fast(self.ran):
            both = " and ".join(wins)
            over = {k: v for part in wins for k, v in parts[part].items()}
            yield from self._measured({both: over}, HOT, STOCK)

    def _measured(self, ways: Mapping[str, Over | None], *beside: str) -> Generator[None]:
        """Compile graphs in these ways, too, and measure them beside those named."""
        turns, names = self._turns, [*beside, *ways]
        turns.also(ways)
        for turns.now in names:
            yield from self._take(_WARM)
        block = max(1, self._steps // _ROUNDS)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-(-self._steps // block)):
            for turns.now in names[:: -1 if number % 2 else 1]:
                yield  # a step that ends what the way before it began
                began = self._now()
                yield from self._take(block)
                times[turns.now].append((self._now() - began) / block)
        standing = _allocated() - self._before
        for turns.now in names:
            rises = list[int]()
            yield  # torch's profiler crashes where two of them meet in a step
            with risen(self._device, rises.append):
                yield
            self.ran[turns.now] = _ran(times[turns.now], block, standing + rises[0])
        turns.now = HOT

    def _take(self, steps: int) -> Generator[None]:
        for _ in range(steps):
            yield

    @property
    def _device(self) -> torch.device:
        assert self._optimizer is not None
        return self._optimizer.param_groups[0]["params"][0].device

    def _now(self) -> float:
        """The time when all that was begun is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _ran(seconds: Sequence[float], block: int, peak: int) -> Ran:
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
    middle = quarters[0], quarters[2]
    return Ran(statistics.median(seconds), middle, len(seconds) * block, peak, tuple(seconds))


def _allocated() -> int:
    """Bytes of tensors on the present GPU; 0 where there is none."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def slower(ours: Ran, other: Ran) -> bool:
    """By more than a difference that is none, and than turns differ among themselves."""
    return ours.seconds > (1 + _SAME) * other.seconds and _longer(ours, other)


def _longer(ours: Ran, other: Ran) -> bool:
    """The middle halves are apart, or it was so each time that they took turns."""
    pairs = list(zip(ours.turns, other.turns, strict=False))
    always = len(pairs) >= _SURELY and all(a > b for a, b in pairs)
    return always or ours.quarters[0] > other.quarters[1]


def _as_fast(ran: Mapping[str, Ran]) -> list[str]:
    """Ways without some part that take no longer than stock, and less than with it."""
    most = min((1 + _SAME) * ran[STOCK].seconds, ran[HOT].seconds)
    return [name for name, r in ran.items() if name not in (HOT, STOCK) and r.seconds < most]


def choice(ran: Mapping[str, Ran]) -> str | None:
    """Without what the next runs go; None: they stay as they are.

    Of what is as fast as stock the one of the smallest peak, else the fastest.
    """
    if not slower(ran[HOT], ran[STOCK]):  # measured again beside its parts
        return None
    if fast := _as_fast(ran):
        return min(fast, key=lambda name: ran[name].peak)
    parts = [name for name in ran if name not in (HOT, STOCK)]
    best = min(parts, key=lambda name: ran[name].seconds, default=HOT)
    return best if slower(ran[HOT], ran[best]) else None


def certify(
    script: str,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    module: bool = False,
    steps: int = 16,
    budget: float = 0.25,
) -> tuple[int, Certificate]:
    """Run a script by "hot" and by stock Inductor; the exit code, and what was found.

    Where hot is slower, what costs time is left out by the next runs (``Findings.lighter``).

    Args:
        script, arguments, options, module: as for ``launch.run``.
        steps: of the optimizer, looked at; as many are measured after them, and as many by stock.
        budget: of a gradient's relative error, as ``Monitor`` has it.

    Raises:
        ScriptError: there is no such script or module.
    """
    monitor = Monitor(budget=budget)
    turns = Turns(options, monitor)
    session = Session(turns, monitor, steps)
    start = starting(script, arguments, module)
    _tell(f"by hot, {steps} steps with looks or more")
    with by_default(turns):
        code = session.drive(start)
    found, ran = session.found or certificate(monitor), session.ran
    parts = {name: r for name, r in ran.items() if name not in (HOT, STOCK)}
    found = dataclasses.replace(found, hot=ran.get(HOT), stock=ran.get(STOCK), parts=parts)
    left_out = choice(ran) if parts else None
    if left_out is not None:
        over = turns.ways[left_out]
        assert over is not None
        because = f"{left_out} is left out: {_gain(ran, left_out)}, as hot-compile certify measured"
        turns.remember(over, because)
        found = dataclasses.replace(found, left_out=because)
    return code, found


def _gain(ran: Mapping[str, Ran], name: str) -> str:
    times = [time_text(ran[way].seconds) for way in (name, HOT, STOCK)]
    return "steps of {} for {} (stock {})".format(*times)


def _tell(what: str) -> None:
    """One line between those of the script: what comes next."""
    Console(stderr=True, highlight=False, markup=False).print(f"hot: {what}", soft_wrap=True)


def table(found: Certificate) -> PlainTable:
    """Step time and peak by hot and by stock, and hot's gradients."""
    columns = ("", "hot", "stock Inductor", "hot / stock")
    shown = PlainTable("measured", *columns, right=set(columns[1:]))
    runs = found.hot, found.stock
    middle = [_times(*ran.quarters) if ran else "" for ran in runs]
    shown.add("step, median", *_cells(runs, lambda ran: ran.seconds, _times))
    shown.add("step, middle half", *middle, "")
    shown.add("peak", *_cells(runs, lambda ran: ran.peak, memory_text))
    if found.errors is not None:
        shown.add("gradients' error, median", f"{found.errors.median:.2%}", "", "")
        shown.add("gradients' error, worst", f"{found.errors.worst:.2%}", "", "")
    if found.noise is not None:
        shown.add("noise of the batch, median", f"{found.noise.median:.0%}", "", "")
    if found.rounding is not None:
        shown.add("rounding without hot, median", f"{found.rounding.median:.2%}", "", "")
    return shown


def parts_tables(found: Certificate) -> Iterator[PlainTable]:
    """What each part of hot costs a step: how steps run without it. Nothing if that is unknown."""
    if not found.parts or found.hot is None:
        return
    columns = ("without", "step, median", "middle half", "it costs", "peak")
    shown = PlainTable("hot without a part", *columns, right=set(columns[1:]))
    for name, ran in found.parts.items():
        costs = found.hot.seconds - ran.seconds
        cost = f"{'-' * (costs < 0)}{time_text(abs(costs))}"
        shown.add(name, _times(ran.seconds), _times(*ran.quarters), cost, memory_text(ran.peak))
    yield shown


def _times(*seconds: float) -> str:
    return " to ".join(map(time_text, seconds))


def _cells(
    runs: Sequence[Ran | None], figure: Callable[[Ran], Any], text: Callable[[Any], str]
) -> list[str]:
    """A figure of each run, and its ratio."""
    figures = [None if ran is None else figure(ran) for ran in runs]
    both = all(figures)
    ratio = f"{figures[0] / figures[1]:.2f}" if both else ""  # type: ignore[operator]
    return [*("" if each is None else text(each) for each in figures), ratio]


def verdict(found: Certificate) -> str:
    """Whether hot is worth it there, in a sentence."""
    hot, stock = found.hot, found.stock
    if found.errors is None:
        return "No verdict: no gradient could be compared."
    if hot is None or stock is None:
        who = "hot" if hot is None else "stock Inductor"
        return f"No verdict: by {who} the script ended before enough steps of an optimizer."
    if found.off:
        return f"Not worth it as it is: {len(found.off)} gradients are off by more than the budget."
    share, ratio = hot.peak / max(1, stock.peak), hot.seconds / stock.seconds
    apart = _longer(hot, stock) or _longer(stock, hot)
    same = not apart or abs(ratio - 1) < _SAME
    longer = f"{abs(ratio - 1):.0%} {'longer' if ratio > 1 else 'shorter'}"
    took = "no other step time that could be told apart" if same else f"steps {longer}"
    smaller = share < _SMALLER
    if smaller:
        worth = "Worth it" if same or ratio < 1 else "Worth it where memory is short"
    else:
        worth = "Not worth it" if same or ratio > 1 else "Worth it"
    return (
        f"{worth}: {share:.2f} of stock's peak, {took}, gradients within {found.errors.worst:.1%}."
    )
