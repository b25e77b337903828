"""How long steps of a graph take their GPU and their host, measured in the run itself.

Marks are set before and after some forwards and backwards: the host's clock, and an event that the
GPU passes when it gets there. Events are read much later. Only the first mark waits for the GPU,
once: so both clocks are known to agree, and how far the GPU is behind its host at every mark.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hot_compile.again import compiled_node
from hot_compile.passes.storage.step_time import StepTime

FIRST = 16
"""Forwards of new code before the first that is timed: allocators and autotuning are done."""
_STEPS = 12
"""Forwards and backwards that are timed; the median counts."""
_MOST = 4 * _STEPS
"""Forwards after which no more are tried: some may have no backward."""
_BEHIND, _LATENCY = 0.03, 50e-6
"""A GPU that is behind its host at a step's end by less than this share of it, or seconds, has
waited for the host."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place in a step, which the host and the GPU pass."""

    host: float
    event: Any
    """A ``torch.cuda.Event`` that the GPU records when it gets there."""


Marker = Callable[[], Mark]
"""Sets a mark now; the first time it waits for the GPU."""
Span = tuple[Mark, Mark, Mark, Mark]
"""Where a step's forward began and ended, and where its backward did."""


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


class StepClock:
    """Times forwards and backwards of a compiled graph that are run through it."""

    def __init__(self, mark: Marker) -> None:
        self._mark = mark
        self._first: Mark | None = None
        self._spans: list[Span] = []
        self._calls = 0

    def __call__(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        """One forward; its backward is timed when it comes."""
        self._calls += 1
        self._first = self._first or self._mark()
        began = self._mark()
        outputs = run(*args)
        ended = self._mark()
        node: Any = compiled_node(outputs, args)
        if node is None:
            return outputs
        marks: list[Mark] = []

        @torch.compiler.disable
        def begins(_: Any) -> None:
            before.remove()
            marks.append(self._mark())

        @torch.compiler.disable
        def finished(*_: Any) -> None:
            after.remove()
            self._spans.append((began, ended, marks[0], self._mark()))

        before, after = node.register_prehook(begins), node.register_hook(finished)
        return outputs

    @property
    def wants_more(self) -> bool:
        """More steps are to be run through it."""
        return len(self._spans) < _STEPS and self._calls < _MOST

    @property
    def vain(self) -> bool:
        """There were no backwards."""
        return not (self._spans or self.wants_more)

    def read(self) -> StepTime | None:
        """What was found, once the GPU is through with it; never waits for that."""
        if self._first is None or not self._spans or not self._spans[-1][3].event.query():
            return None
        first, spans = self._first, self._spans
        host = statistics.median(_seconds(span, _by_host) for span in spans)
        device = statistics.median(_seconds(span, _by_device) for span in spans)
        behind = (_by_device(first, s[3]) - _by_host(first, s[3]) for s in spans)
        waits = statistics.median(behind) < max(_LATENCY, _BEHIND * host)
        return StepTime(device, host, waits)


def clock_of(devices: Sequence[torch.device]) -> StepClock | None:
    """Of a graph with inputs there; None unless one of them is a GPU, and one only."""
    gpus = [device for device in devices if device.type == "cuda"]
    return StepClock(CudaMarks(*gpus)) if len(gpus) == 1 else None


def _seconds(span: Span, between: Callable[[Mark, Mark], float]) -> float:
    """Of forward and backward, without what lies between them."""
    return between(*span[:2]) + between(*span[2:])


def _by_host(a: Mark, b: Mark) -> float:
    return b.host - a.host


def _by_device(a: Mark, b: Mark) -> float:
    return a.event.elapsed_time(b.event) / 1e3
