"""How long a step takes its GPU and its host, measured in the run itself.

A step is one forward and backward of all graphs that an optimizer's step needs: breaks of Dynamo's,
and DDP, make several of one model. It begins with the first forward after a backward, and ends with
the backward of that same graph, the last one. There, and behind each forward, marks are set: the
host's clock, and an event that the GPU passes when it gets there. Events are read much later. Only
the first mark waits for the GPU, once: so both clocks are known to agree, and how far the GPU is
behind its host at each mark.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hot_compile.again import compiled_node
from hot_compile.passes.storage.step_time import StepTime

FIRST = 16
"""Steps of new code before the first that is timed: allocators and autotuning are done."""
_STEPS = 12
"""Steps that are timed; the median counts."""
_MOST = 512
"""Forwards without a backward after which no more are tried."""
_BEHIND, _LATENCY = 0.03, 50e-6
"""A GPU that is behind its host at a mark by less than this share of a step, or seconds, has waited
for the host: in a Whisper's decoder, say, though its encoder keeps it busy."""
_BUSY = 1.5
"""Not so a GPU that takes so many times its host's time for a step: it was up to date because its
host had waited for it: before a step, and at the end of its forward. A Wav2Vec2 asks for the
largest of its labels, and its loss for lengths: 179 ms, its host 47, and it was thought to wait."""
_WHOLE = 4
"""A graph whose forward takes a GPU one part of so many, or more, of a step is all of it: forwards
are a quarter of one that is computed again, else a third."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in a step, which the host and the GPU pass."""

    host: float
    event: Any
    """A ``torch.cuda.Event`` that the GPU records when it gets there."""


Marker = Callable[[], Mark]
"""Sets a mark now; the first time it waits for the GPU."""


class CudaMarks:
    """Sets marks on a GPU's present stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waited = False

    def __call__(self) -> Mark:
        """One mark."""
        if not self._waited:
            torch.cuda.synchronize(self._device)
            self._waited = True
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return Mark(time.perf_counter(), event)


@dataclasses.dataclass(eq=False)
class _Step:
    """One that has begun; it lives as long as its backward may come."""

    marks: list[Mark] | None
    """Where it began, and behind each forward; None: it is not timed."""
    calls: Counter[Any] = dataclasses.field(default_factory=Counter)
    """How many forwards of each graph it had."""


class StepClock:
    """Times the steps of the graphs whose forwards are run through it."""

    def __init__(self, mark: Marker) -> None:
        self._mark = mark
        self.found: StepTime | None = None
        self.warm = 0.0
        """When the first step was through, by the host's clock."""
        self.again()

    def again(self) -> None:
        """Some code is new: what was timed counts no more."""
        self.graphs: set[Any] = set()
        """Those that are parts of the steps."""
        self._first: Mark | None = None
        self._spans: list[list[Mark]] = []
        self._calls: list[Counter[Any]] = []
        self._steps = self._forwards = 0
        self._open: Callable[[], _Step | None] = lambda: None

    def __call__(
        self, run: Callable[..., Any], args: Sequence[Any], graph: Any = None, usual: bool = True
    ) -> Any:
        """One forward of ``graph``. ``usual``: it is none that takes longer than others."""
        self._forwards += 1
        self.graphs.add(graph)
        if not self._between():
            step = self._open()
            if not usual and step is not None:
                step.marks = None
            outputs = run(*args)
            self._passes(step, graph)
            return outputs
        step = _Step(self._begins() if usual else None)
        outputs = run(*args)
        self._passes(step, graph)
        node: Any = compiled_node(outputs, args)
        if node is None:
            return outputs
        self._open = weakref.ref(step)

        @torch.compiler.disable
        def finished(*_: Any) -> None:
            after.remove()
            if self._open() is step:
                self._ends(step)

        after = node.register_hook(finished)
        return outputs

    def _between(self) -> bool:
        """No step is under way. What a backward computes again is part of it."""
        return self._open() is None and torch._C._current_graph_task_id() == -1

    def _begins(self) -> list[Mark] | None:
        if self._steps < FIRST or not self.wants_more:
            return None
        self._first = self._first or self._mark()
        return [self._mark()]

    def _passes(self, step: _Step | None, graph: Any) -> None:
        if step is not None and step.marks is not None:
            step.marks.append(self._mark())
            step.calls[graph] += 1

    def _ends(self, step: _Step) -> None:
        self._open = lambda: None
        self.warm = self.warm or time.perf_counter()
        self._steps, self._forwards = self._steps + 1, 0
        if step.marks is not None:
            self._spans.append([*step.marks, self._mark()])
            self._calls.append(step.calls)

    @property
    def wants_more(self) -> bool:
        """More steps are to be run through it."""
        return len(self._spans) < _STEPS and self._forwards < _MOST

    @property
    def vain(self) -> bool:
        """There were no backwards."""
        return not (self._spans or self.wants_more)

    def calls(self, graph: Any) -> float:
        """Forwards of ``graph`` that a step has: blocks that are alike may share one."""
        return max(1.0, statistics.median(calls[graph] for calls in self._calls))

    @property
    def largest_share(self) -> float:
        """Of a step, what a call of its first graph may be at most: ``_WHOLE`` times its forward.
        Blocks that are compiled each by itself have the others in their steps."""
        found = []
        for begin, forward, *_, end in self._spans:
            whole = _by_device(begin, end)
            found.append(_by_device(begin, forward) / whole if whole else 1.0)
        return min(1.0, _WHOLE * statistics.median(found))

    def read(self) -> StepTime | None:
        """What was found, once the GPU is through with it; never waits for that.

        It comes up between two steps: so all graphs of one get to know it before the next.
        """
        spans = () if self.wants_more else self._spans
        if self.found is None and spans and self._between() and spans[-1][-1].event.query():
            first = self._first
            assert first is not None
            host = statistics.median(_by_host(span[0], span[-1]) for span in spans)
            device = statistics.median(_by_device(span[0], span[-1]) for span in spans)
            behind = (
                min(_by_device(first, mark) - _by_host(first, mark) for mark in span[1:])
                for span in spans
            )
            waits = statistics.median(behind) < max(_LATENCY, _BEHIND * host)
            waits = waits and device < _BUSY * host
            self.found = StepTime(device, host, waits)
        return self.found


def clock_of(devices: Sequence[torch.device]) -> StepClock | None:
    """Of a graph with inputs there; None unless one of them is a GPU, and one only."""
    gpus = [device for device in devices if device.type == "cuda"]
    return StepClock(CudaMarks(*gpus)) if len(gpus) == 1 else None


def _by_host(a: Mark, b: Mark) -> float:
    return b.host - a.host


def _by_device(a: Mark, b: Mark) -> float:
    return a.event.elapsed_time(b.event) / 1e3
