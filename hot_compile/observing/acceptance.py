"""What is on by default: a run's gradients are looked at, repaired, and what was found remembered.

A monitor without paths. Its looks are few and cheap: the exact twin is the graph itself, run
operator by operator (``eager``); only where that finds a fault a thorough twin is compiled. What
was found is kept beside Inductor's caches: the next process starts with it. All processes of a job
take what the first of them found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hot_compile.again import called_in, only_once
from hot_compile.config import HotConfig
from hot_compile.figures import graph_facts
from hot_compile.observing.auto import step_being_compiled
from hot_compile.observing.monitor import AS_STOCK, KEPT_AS, Monitor, Qualities
from hot_compile.observing.raising import Stored, bits_by_tensor
from hot_compile.observing.step_clock import StepClock, clock_of
from hot_compile.observing.stretches import enters_autocast
from hot_compile.observing.walk import HALVES
from hot_compile.passes.base.files import write_whole
from hot_compile.passes.cost.tuned import in_job
from hot_compile.passes.storage.step_time import SLACK, StepTime

if TYPE_CHECKING:
    from hot_compile.observing.gauge import Gauge

log = logging.getLogger("hot_compile")

BUDGET = 0.2
"""Relative error that a gradient may have: a cosine of 0.98."""
LASTS = 20.0
"""A run that has taken so many times as long as its first step, mostly compiling, is compiled again
for what its steps take; a shorter one leaves that to the next, which begins so."""
_FIRST = (1, 2, 4, 8)
"""Forwards of new code that are looked at; then each power of the last, from 64 on."""
_AWAITED = 4
"""For so many forwards, from a look on, it is asked what other processes of the job found."""
_HARMLESS = frozenset({"accept", "dump", "monitor", "strict"})
"""Options that change nothing that looks find."""
_REPAIRS = "demoted", "raised", "stored", "forwards"
"""What a monitor changes, by name: what of, and why."""


@dataclasses.dataclass
class Findings:
    """What looks at one graph found."""

    demoted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers that are exact, and why."""
    raised: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that are stored in more bits: how many, and why."""
    forwards: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose forward is exact, and why."""
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose graph stores nothing compressed, and why."""
    settled: bool = False
    """The first looks found nothing any more."""
    step: StepTime | None = None
    """How long steps took, if it comes out otherwise by that."""
    timed: bool = False
    """How long they took changes nothing more: what was compiled for that was timed, too."""
    lighter: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options laid over the user's: they leave out what was measured to cost time."""
    because: str = ""
    """What was measured, where they do."""

    def __bool__(self) -> bool:
        return any(self.repairs) or bool(self.step or self.lighter)

    @property
    def repairs(self) -> list[dict[str, str]]:
        """Those of its parts that a monitor has, too."""
        return [getattr(self, name) for name in _REPAIRS]

    @property
    def as_stock(self) -> bool:
        """The graph is to be compiled as stock compiles it."""
        return any(why.startswith(AS_STOCK) for why in self.stored.values())

    @property
    def summary(self) -> str:
        """What follows from it, in words."""
        exact = len(set().union(*self.repairs))
        parts = [f"{exact} layers or tensors are more exact"] * bool(exact)
        parts += [f"a step is known to take {self.step}"] * bool(self.step)
        parts += [self.because] * bool(self.lighter)
        return ", ".join(parts)

    @classmethod
    def load(cls, path: Path) -> Findings:
        """What was kept; nothing if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return cls.from_text(path.read_text())
        return cls()

    @classmethod
    def from_text(cls, text: str) -> Findings:
        """Of JSON. Raises ValueError, TypeError or AttributeError for anything else."""
        found = cls(**json.loads(text))
        found.step = StepTime(**found.step) if found.step else None  # type: ignore[arg-type]
        list(bits_by_tensor(found.raised))
        if not all(isinstance(part, dict) for part in found.repairs):
            raise TypeError(text)
        HotConfig.from_options(found.lighter)
        return found

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def save(self, path: Path) -> None:
        """Write it whole or not at all; a folder that cannot be written is none."""
        with contextlib.suppress(OSError):
            write_whole(path, self.text)


def folder() -> Path:
    """Where findings lie: beside Inductor's caches."""
    return Path(cache_dir()) / "hot_compile" / "accepted"


def path_of(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Path:
    """The file of a graph, by all that tells it from others; GPUs of a job count as one.

    Of ``options`` those count that change what looks find.
    """
    kept = {k: v for k, v in (options or {}).items() if k.removeprefix("hot.") not in _HARMLESS}
    facts = graph_facts(gm, examples, mode, kept)
    digest = hashlib.sha256(re.sub(r"cuda:\d+", "cuda", facts).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


class Acceptance(Monitor):
    """Looks at steps by itself, and keeps what it found."""

    sums = True

    def __init__(self) -> None:
        super().__init__(budget=BUDGET)
        self._known: dict[Path, Findings] = {}
        self.unseen: dict[str, str] = {}
        """Graphs that nobody can look at, and why."""
        self.times: dict[str, StepTime] = {}
        """How long the steps take that graphs are parts of, where that was measured."""
        self._clock: StepClock | None = None
        self._told: set[str] = set()
        """What was said once."""
        self._begun = self._warm = time.perf_counter()
        """When the first graph was compiled, and when its first step was through."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Acceptance:
        """Of a step's copy, which is compiled by itself."""
        return Acceptance()

    def __reduce__(self) -> tuple[type[Acceptance], tuple[()]]:
        """A step is saved without what was seen of it."""
        return Acceptance, ()

    def begins(self, path: Path) -> Findings:
        """A graph is being compiled: start with what is known of it."""
        found = self._known.get(path)
        if found is None:
            mine = Findings.load(path)
            mine.timed |= mine.step is not None  # not to be compared with another day's host
            found = self._known[path] = _agreed(path, 0, mine) or mine
            if found and self._is_news(found.summary):
                log.warning(
                    "hot: from the beginning %s, as earlier runs found (%s). `hot-compile profile "
                    "forget` forgets it, options={'accept': 'off'} goes without.",
                    found.summary,
                    path,
                )
        if found.step is not None:
            self.times[path.stem] = found.step
        self._take(found)
        return found

    def cannot_see(self, path: Path, why: str) -> bool:
        """A graph's steps cannot be looked at, if there is a reason, which is said once."""
        if why and self._is_news(why):
            log.warning(
                "hot: gradients are not compared with exact ones: %s (docs/acceptance.md)", why
            )
        if why:
            self.unseen[path.stem] = why
        return bool(why)

    def clock(self, path: Path, devices: Sequence[torch.device]) -> StepClock | None:
        """Of the steps that a graph which was just compiled is a part of; None: they are known.

        What is compiled for what steps took is timed once more.
        """
        if self._is_timed(path):
            return None
        if self._clock is not None and self._clock.wants_more:
            self._clock.again()
            return self._clock
        before, self._clock = self._clock, clock_of(devices)
        for graph in self.graphs:  # those that stay as they are make up steps as long as before
            gauge = graph.gauge
            if before and gauge in before.graphs and gauge.path and self._is_timed(gauge.path):
                graph.clock = self._clock
        return self._clock

    def _is_timed(self, path: Path) -> bool:
        """It is known what steps take that a graph is a part of, compiled as it is."""
        known = self._known[path]
        return known.timed or (path.stem in self.times and known.step is None)

    def due(self, forwards: int, settled: bool = False) -> bool:
        """As of a monitor; code that was found settled is looked at seldom from the beginning."""
        if forwards <= _FIRST[-1]:
            return not settled and forwards in _FIRST
        while forwards % _FIRST[-1] == 0:
            forwards //= _FIRST[-1]
        return forwards == 1

    def wakes(self, forwards: int, settled: bool) -> bool:
        """As of a monitor; in a job what others found is asked for some forwards after a look."""
        return any(self.due(forwards - n, settled) for n in range(_AWAITED if in_job() else 1))

    def repair(
        self, step: int, found: Qualities, stored: Mapping[str, Stored], gauge: Gauge
    ) -> bool:
        """As a monitor does; the first process of a job decides for all."""
        before = {name: dict(getattr(self, name)) for name in _REPAIRS}
        changed, path, number = (
            super().repair(step, found, stored, gauge),
            gauge.path,
            gauge.repairs + 1,
        )
        if path is None or not changed:
            return changed
        mine = dataclasses.replace(self._known[path], settled=False)
        for name, old in before.items():
            new = {key: why for key, why in getattr(self, name).items() if old.get(key) != why}
            setattr(mine, name, {**getattr(mine, name), **new})
        self._keep(path, _agreed(path, number, mine) or mine)
        return True

    def follows(self, gauge: Gauge, forwards: int) -> bool:
        """Another process of the job has repaired this graph: do the same."""
        lately = any(self.due(forwards - n, gauge.settled) for n in range(1, _AWAITED))
        if gauge.path is None or not (lately and in_job()):
            return False
        theirs = _agreed(gauge.path, gauge.repairs + 1, None)
        if theirs is None:
            return False
        self._keep(gauge.path, theirs)
        return True

    def settles(self, gauge: Gauge) -> None:
        """A look at a graph found no fault."""
        known = self._known.get(gauge.path) if gauge.path else None
        if known is None or known.settled or gauge.looks < len(_FIRST) or self._pends(gauge):
            return
        gauge.settled = known.settled = True
        assert gauge.path is not None
        known.save(gauge.path)

    def timed(self, clock: StepClock, gauge: Gauge, differs: Callable[[StepTime], bool]) -> bool:
        """As of a monitor; what the first process of a job measured counts for all."""
        assert gauge.path is not None
        assert clock.found is not None
        if self._is_timed(gauge.path):  # timed for others' sake
            self.times[gauge.path.stem] = clock.found
            return False
        path, known = gauge.path, self._known[gauge.path]
        again = " again" * (known.step is not None)
        whole = min(g.path for g in clock.graphs)  # agreed on once for all parts
        mine = Findings(step=clock.found)
        found = (_agreed(whole, f"step{again}", mine) or mine).step or clock.found
        self.times[path.stem], self._warm = found, clock.warm
        mine = _compared(known, found) if again else _followed(known, found, gauge, clock)
        agreed = _agreed(path, f"time{again}", mine) or mine
        if agreed != known:
            self._keep(path, agreed)
        if not again or agreed.step is not None:
            return self.overdue(gauge, differs)
        if self._is_news(text := f"{found}; before: {known.step}"):
            log.warning("hot: compiled for that, a step takes longer: %s. It is undone.", text)
        return True

    def overdue(self, gauge: Gauge, differs: Callable[[StepTime], bool]) -> bool:
        """As of a monitor, once the run has lasted long enough for another compile to be little."""
        now = time.perf_counter()
        if not self._pends(gauge) or now - self._begun < LASTS * (self._warm - self._begun):
            return False
        assert gauge.path is not None
        known = self._known[gauge.path]
        assert known.step is not None
        if not _tried(differs, known.step):
            self._keep(gauge.path, dataclasses.replace(known, step=None, timed=True))
            return False
        if self._is_news(text := str(known.step)):
            log.warning("hot: a step takes %s. It is compiled again for that, once.", text)
        return True

    def _pends(self, gauge: Gauge) -> bool:
        """Its graph was compiled for steps that take otherwise than this run found."""
        known = self._known.get(gauge.path) if gauge.path else None
        if known is None or known.step is None or self._warm == self._begun:
            return False
        return known.step.tells_more_than(gauge.step)

    def _is_news(self, text: str) -> bool:
        """It was not said of another graph."""
        known, self._told = text in self._told, self._told | {text}
        return not known

    def _take(self, found: Findings) -> None:
        for name, part in zip(_REPAIRS, found.repairs, strict=True):
            getattr(self, name).update(part)

    def _keep(self, path: Path, found: Findings) -> None:
        self._known[path] = found
        self._take(found)
        found.save(path)


def _tried(differs: Callable[[StepTime], bool], found: StepTime) -> bool:
    """Whether that changes anything; not if nobody can tell."""
    try:
        return differs(found)
    except Exception:
        log.debug("hot: a graph cannot be planned anew", exc_info=True)
        return False


def _followed(known: Findings, found: StepTime, gauge: Gauge, clock: StepClock) -> Findings:
    """With what one of a step's graphs is to be compiled for, if that is another time."""
    found = dataclasses.replace(found, share=_share(gauge, clock))
    changes = found.tells_more_than(gauge.step)
    return dataclasses.replace(known, step=found, settled=False) if changes else known


def _compared(known: Findings, found: StepTime) -> Findings:
    """What was compiled for a step's time was timed: without that time if it takes longer."""
    assert known.step is not None
    if found.device <= (1 + SLACK) * known.step.device:
        return dataclasses.replace(known, timed=True)
    return dataclasses.replace(known, step=None, timed=True, settled=False)


def _share(gauge: Gauge, clock: StepClock) -> float:
    """Of a step: the part that one call of a graph is about, as predicted where all are."""
    calls = {graph: clock.calls(graph) for graph in clock.graphs}
    if len(calls) == 1:
        return min(1 / calls[gauge], clock.largest_share)
    predicted = {graph: graph.step.device for graph in calls if graph.step}
    if len(predicted) == len(calls):
        return predicted[gauge] / sum(calls[graph] * predicted[graph] for graph in calls)
    return 1 / sum(calls.values())


def of_step_being_compiled() -> Acceptance:
    """What looks at it: one and the same however often it is compiled, kept where the step is."""
    step = step_being_compiled()
    return Acceptance() if step is None else vars(step).setdefault(KEPT_AS, Acceptance())


def cannot_be_repeated(gm: fx.GraphModule, examples: Sequence[Any]) -> str:
    """Why a graph cannot be run a second time, operator by operator; empty if it can be."""
    if any("flex_attention" in name for name in called_in(gm)):
        return "flex attention takes too much memory uncompiled"
    return only_once(gm, examples)


def computes_halves(gm: fx.GraphModule, examples: Sequence[Any]) -> bool:
    """A graph computes in bf16 or fp16, where compiled code rounds less often."""
    given = [x for x in examples if isinstance(x, torch.Tensor)]
    inside = any(map(torch.is_autocast_enabled, {x.device.type for x in given}))
    return (
        inside or any(x.dtype in HALVES for x in given) or any(map(enters_autocast, gm.graph.nodes))
    )


def _agreed(path: Path, number: int | str, mine: Findings | None) -> Findings | None:
    """What the first process of the job to find anything found; alone: ``mine``.

    It is told through the job's store, not by a collective: not every process may look.

    Args:
        path: of the graph. number: of its repair; 0: what was known before; "time": its steps'.
        mine: what this process would have; None: nothing, it only asks.
    """
    if not in_job():
        return mine
    try:
        store = distributed.distributed_c10d._get_default_store()
        key = f"hot_compile/accepted/{path.name}/{number}"
        if mine is None:
            return Findings.from_text(store.get(key).decode()) if store.check([key]) else None
        return Findings.from_text(store.compare_set(key, "", mine.text).decode())
    except (RuntimeError, ValueError, TypeError, AttributeError):
        log.debug("hot: the job's store does not answer", exc_info=True)
        return mine
