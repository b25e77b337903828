"""``hot-compile certify script.py``: some steps by "hot", looked at and measured, then by stock.

The script runs twice in this process, and is ended each time after enough of its optimizer's steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_post_hook

from .launch import ended, hot_by_default, starting, stock_by_default
from .memory import risen
from .observing.certificate import Certificate, Ran, certificate
from .observing.monitor import Monitor
from .sizes import memory_text, time_text
from .tables import PlainTable

_WARM = 3
"""Steps after the last look that are not measured: what was repaired is compiled in them."""
_LONGEST = 4
"""Looks go on for at most so many times the steps asked for, while something is being repaired."""
_SAME = 0.02
"""Relative difference of step times that is none."""
_SMALLER = 0.95
"""Peaks below this share of stock's are smaller."""
_NEVER = sys.maxsize


class _Enough(SystemExit):
    """Ends the script: no ``except Exception`` of its own is to stop that."""


class Pace:
    """Counts a script's steps by its first optimizer; measures some of them, then ends it."""

    def __init__(self, ready: Callable[[int], bool], steps: int) -> None:
        """``ready``: after so many steps the next ones may be measured, ``steps`` of them."""
        self._ready, self._steps = ready, steps
        self._optimizer: torch.optim.Optimizer | None = None
        self._before = _allocated()
        self._times: list[float] = []
        self._rising, self._rises = contextlib.ExitStack(), list[int]()
        self._standing = 0
        self.done = 0
        """Steps so far."""
        self.warm: int | None = None
        """Steps before it was ready."""
        self.ran: Ran | None = None
        """How steps ran; None if the script ended before enough of them."""

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After each step of an optimizer."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self.done += 1
        if self.warm is None and self._ready(self.done):
            self.warm = self.done
        if self.warm is None or self.done < self.warm + _WARM:
            return
        device = optimizer.param_groups[0]["params"][0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if len(self._times) > self._steps:
            self._rising.close()
            self.ran = self._found()
            raise _Enough
        self._times.append(time.perf_counter())
        if len(self._times) > self._steps:  # memory is told of one step more: telling takes time
            self._standing = _allocated() - self._before
            self._rising.enter_context(risen(device, self._rises.append))

    def _found(self) -> Ran:
        seconds = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        middle, peak = (quarters[0], quarters[2]), self._standing + self._rises[-1]
        return Ran(statistics.median(seconds), middle, len(seconds), peak)

    def drive(self, start: Callable[[], Any]) -> int:
        """Run a script until it is enough, or it ends; its exit code."""
        hook = register_optimizer_step_post_hook(self)
        try:
            return ended(start)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            hook.remove()
            self._rising.close()


def _allocated() -> int:
    """Bytes of tensors on the present GPU; 0 where there is none."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def certify(
    script: str,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    module: bool = False,
    steps: int = 16,
    budget: float = 0.25,
) -> tuple[int, Certificate]:
    """Run a script by "hot" and then by stock Inductor; the exit code, and what was found.

    Args:
        script, arguments, options, module: as for ``launch.run``.
        steps: of the optimizer, looked at; as many are measured after them, and the same by stock.
        budget: of a gradient's relative error, as ``Monitor`` has it.

    Raises:
        ScriptError: there is no such script or module.
    """
    monitor = Monitor(budget=budget)

    def ready(done: int) -> bool:
        if done < steps or (monitor.busy and done < _LONGEST * steps):
            return False
        monitor.every = _NEVER
        return True

    ours = Pace(ready, steps)
    start = starting(script, arguments, module)
    main, given = vars(sys.modules["__main__"]), list(sys.argv)
    before, began = dict(main), time.perf_counter()
    _tell(f"by hot, {steps} steps with looks or more, then {steps} that are timed")
    with hot_by_default({**options, "monitor": monitor}):
        code = ours.drive(start)
    found = dataclasses.replace(certificate(monitor), hot=ours.ran)
    if code or ours.ran is None:
        return code, found
    monitor.graphs.clear()  # they hold code, and code holds memory
    main.clear()  # the module stays the same, which Dynamo remembers
    main.update(before)
    sys.argv[:] = given
    _forget()
    _tell(f"by stock Inductor, as many; hot took {time_text(time.perf_counter() - began)}")
    theirs = Pace(lambda done: done >= (ours.warm or 0), steps)
    with stock_by_default():
        code = theirs.drive(start)
    return code, dataclasses.replace(found, stock=theirs.ran)


def _tell(what: str) -> None:
    """One line between those of the script: what comes next."""
    Console(stderr=True, highlight=False, markup=False).print(f"hot: {what}", soft_wrap=True)


def _forget() -> None:
    """What a script left behind: what was compiled, its process group, memory."""
    torch._dynamo.reset()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # the first run has paid for them, too
        torch.cuda.empty_cache()


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
    return shown


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
    apart = hot.quarters[0] > stock.quarters[1] or hot.quarters[1] < stock.quarters[0]
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
