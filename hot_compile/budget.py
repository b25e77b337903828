"""``options={"peak_budget": "16GiB"}``: a budget of what the device's memory rises to in a step.

What a graph may add is what is asked for less what stands when it is compiled; a prediction says
what to recompute and store to that end (``passes/storage/fit_budget.py``). On a GPU the allocator
then tells how high two later steps really rise. What is off by more than 5 % has its graphs
compiled again, each with its share of the difference, at most twice, or a third time if they are
too high (docs/adr/0023).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .again import compiled_node
from .observing.forgetting import forget
from .passes.base.files import write_whole
from .passes.option_warnings import LESS, tell
from .passes.storage.fit_budget import Allowance, BudgetReport
from .runtime.native.build import cache_dir
from .sizes import memory_text

log = logging.getLogger("hot_compile")

_TOLERANCE = 0.05
_CORRECTIONS = {"up": 2, "down": 3}
"""A step that holds less than it might is worth fewer compilations than one that may not fit."""
_WARM_UP = 2
"""Steps that are not measured: the first compiles, and ends with the optimizer's states made."""
_STEEPEST = 4.0
_MEASURED = 2
"""Steps that are: gradients that are added up may stand before one and not before another."""


@dataclasses.dataclass(frozen=True)
class Meter:
    """What tells of a device's memory."""

    allocated: Callable[[], int]
    """Bytes of tensors now."""
    restart: Callable[[], None]
    """Let ``peak`` count from now on."""
    peak: Callable[[], int]
    """The most there were since."""


def allocator(device: torch.device) -> Meter:
    """CUDA's. Restarting it resets ``torch.cuda.max_memory_allocated``: it has one count only."""
    return Meter(
        partial(torch.cuda.memory_allocated, device),
        partial(torch.cuda.reset_peak_memory_stats, device),
        partial(torch.cuda.max_memory_allocated, device),
    )


@dataclasses.dataclass(eq=False)
class Share:
    """One graph's part of a budget."""

    code: CodeType | None
    """What Dynamo compiled it of."""
    allowed: int | None = None
    """Bytes that it may add, since its prediction was corrected."""
    between: bool = False
    """Only between its forward and its backward: others of the same step run then."""
    corrections: int = 0
    settled: bool = False
    """It is not measured any more."""
    met: BudgetReport | None = None
    """What it was compiled to."""
    note: Path | None = None
    """Where a correction is kept for later processes."""
    first: int | None = None
    """Bytes that it was allowed by prediction alone."""

    def guess(self, predicted: int) -> int:
        """Bytes that it may add before any measurement: as an earlier process was corrected."""
        kept = 0
        if self.note is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                kept = int(json.loads(self.note.read_text()))
        self.first = predicted if self.first is None else self.first
        return max(0, predicted + kept)

    def keep(self) -> None:
        """Note by how much it was corrected; what is of several graphs is of that step only."""
        if self.note is None or self.first is None or not self.corrections or self.between:
            return
        with contextlib.suppress(OSError):
            write_whole(self.note, json.dumps((self.allowed or 0) - self.first))

    def told(self, met: BudgetReport) -> None:
        """It was compiled."""
        self.met = met

    def size(self, alone: bool) -> int:
        """Bytes that one call of it is predicted to add to a step, to which others add or none."""
        if self.met is None:
            return 0
        return self.met.rise if alone else self.met.held

    def room(self, down: bool, alone: bool) -> int:
        """Bytes in proportion to which it can hold less, or more; 0 if it cannot."""
        met = self.met
        if met is None or self.corrections >= _CORRECTIONS["down" if down else "up"]:
            return 0
        can = met.least is None if down else met.recomputed + met.stored + met.hosted > 0
        return self.size(alone) if can else 0

    def correct(self, excess: float, alone: bool) -> bool:
        """Add so much less (or more) from now on; False if it would be compiled to the same."""
        assert self.met is not None
        now, between = self.size(alone), not alone
        allowed = max(0, int(now - excess))
        if now < allowed < self.met.above and self.met.between == between:
            return False
        self.allowed, self.between = allowed, between
        self.corrections += 1
        return True


class Ledger:
    """The graphs that share a budget on one device, and what their steps were seen to take."""

    def __init__(self, asked: int, meter: Meter | None) -> None:
        """``meter``: None where nobody counts; the prediction is not corrected then."""
        self.asked = asked
        self._meter = meter
        self._shares: dict[Hashable, Share] = {}
        self._open = 0
        """Forwards whose backwards are to come: of one step, what is held at one time."""
        self._void = False
        """Some of them had no backward: the step says nothing."""
        self._now: Counter[Share] = Counter()
        self._stepped = False
        self._since_compiled = 0
        self._peaks: list[int] = []
        self._calls: Counter[Share] = Counter()
        self._seen: tuple[int, int] | None = None
        """(predicted rise, peak) when it was last judged."""

    def share(self, code: CodeType | None, key: Hashable) -> Share:
        """The graph's, the same when it is compiled again."""
        return self._shares.setdefault((code, key), Share(code))

    def allowance(self, share: Share, given: int, states: int) -> Allowance:
        """What a graph that is compiled now may add.

        Args:
            share: the graph's. given: bytes of its parameters and inputs.
            states: bytes that an optimizer may make in the first step.
        """
        self._since_compiled, self._peaks, share.settled = 0, [], False
        standing = self._meter.allocated() if self._meter else given
        to_come = 0 if self._stepped else max(0, states - max(0, standing - given))
        first = not any(known.met for known in self._shares.values())
        predicted = self.asked - standing - to_come
        allowed = share.guess(predicted) if share.allowed is None else share.allowed
        between = share.between and share.allowed is not None
        return Allowance(self.asked, standing, to_come, allowed, between, first, share.told)

    def enter(self, share: Share) -> Call | None:
        """A forward of the graph begins; None if nobody wants to know."""
        if self._meter is None or share.settled:
            return None
        if not self._open:
            if len(self._peaks) >= _MEASURED:
                self._judge(max(self._peaks))
            self._void, self._now = False, Counter()
            if self._since_compiled >= _WARM_UP:
                self._meter.restart()
        self._now[share] += 1
        self._open += 1
        return Call(self)

    def leave(self, ran: bool) -> None:
        """A forward's backward has run, or never will; perhaps it was the step's last."""
        self._void |= not ran
        self._open -= 1
        if self._open or self._void:
            return
        assert self._meter is not None
        self._stepped = True
        self._since_compiled += 1
        if self._since_compiled > _WARM_UP:
            self._peaks.append(self._meter.peak())
            self._calls = self._now

    def _judge(self, peak: int) -> None:
        """Correct what the graphs may add, if that is off and can be mended.

        Called at the next forward, outside of any backward: code may be forgotten then.
        """
        calls, self._peaks, self._since_compiled = self._calls, [], 0
        excess = peak - self.asked
        alone = sum(calls.values()) == 1
        rooms = {share: share.room(excess > 0, alone) for share in calls}
        total = sum(rooms[share] * count for share, count in calls.items())
        changed = []
        if abs(excess) > _TOLERANCE * self.asked and total:
            part = excess / self._slope(peak, calls, alone) / total
            changed = [s for s, room in rooms.items() if room and s.correct(part * room, alone)]
        log.info("hot: peak_budget: peak %s of %s", *map(memory_text, (peak, self.asked)))
        for share in changed:
            forget(share.code)
        if changed:
            return
        for share in calls:
            share.settled = True
            share.keep()
        if excess > _TOLERANCE * self.asked:
            asked, rose = map(memory_text, (self.asked, peak))
            tell([f"peak_budget was not met: {asked} were asked for, steps rose to {rose}. {LESS}"])

    def _slope(self, peak: int, calls: Counter[Share], alone: bool) -> float:
        """Bytes by which the peak is likely to fall for each byte that is predicted to."""
        rise = sum(share.size(alone) * count for share, count in calls.items())
        before, self._seen = self._seen, (rise, peak)
        if before is None or before[0] == rise:
            return 1.0
        slope = (peak - before[1]) / (rise - before[0])
        return min(max(slope, 1 / _STEEPEST), _STEEPEST)


class Call:
    """One forward of a graph, until its backward has run or its results are dropped."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Ledger | None = ledger

    def over(self, ran: bool) -> None:
        """Once."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.leave(ran)

    def __del__(self) -> None:
        self.over(False)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a graph is compiled under."""

    ledger: Ledger
    share: Share
    given: int
    """Bytes of parameters and inputs."""
    states: int
    """Bytes that an optimizer may make of its own: two numbers for each that is trained."""

    def allowance(self) -> Allowance:
        """What the graph may add if it is compiled now."""
        return self.ledger.allowance(self.share, self.given, self.states)


class Budgeted:
    """A compiled graph whose steps are measured while its share of the budget is not settled."""

    def __init__(self, run: Callable[..., Any], budget: Budget) -> None:
        self._run = run
        self._budget = budget

    def __call__(self, *args: Any) -> Any:
        """One forward."""
        asked = any(isinstance(a, FakeTensor) for a in args)  # DDP, what its next part is given
        call = None if asked else self._budget.ledger.enter(self._budget.share)
        if call is None:
            return self._run(*args)
        outputs = self._run(*args)
        node = compiled_node(outputs, args)
        if node is None:  # nothing is held of it
            call.over(True)
        else:
            # the hook holds the call, and goes with the node
            node.register_hook(torch.compiler.disable(lambda *_: call.over(True)))
        return outputs


def note_of(digest: str) -> Path:
    """The file of a graph's correction: a number of bytes."""
    return cache_dir() / "budgets" / f"{digest[:32]}.json"


@cache
def ledger_of(device: torch.device, asked: int) -> Ledger:
    """The one of this process: its device's memory is one, whichever model is in it."""
    return Ledger(asked, allocator(device) if device.type == "cuda" else None)
