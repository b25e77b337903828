"""Option ``schedule``: other bit widths after some steps, without compiling anything again.

Every width of the schedule is compiled when the graph is, and a step counter picks one per forward.
The paper trains its first epochs with INT8 and the rest with INT4 this way.

The counter counts calls of ``optimizer.step()`` (the largest count, where there are several
optimizers). ``state_dict`` and ``load_state_dict`` carry it through a checkpoint; ``set_step`` puts
it where a loop of your own says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .config import Phase
from .errors import OptionError

STATE_VERSION = 1


class Clock:
    """How many optimizer steps this process has made, or was told that it has."""

    def __init__(self) -> None:
        self.step = 0
        self._start = 0
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._counting = False

    def count(self) -> None:
        """Count every optimizer's steps from now on."""
        if not self._counting:
            register_optimizer_step_post_hook(self._stepped)
            self._counting = True

    def set(self, step: int) -> None:
        """Go to ``step`` and count on from there."""
        self.step = self._start = step
        self._counts.clear()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.step = max(self.step, self._start + self._counts[optimizer])


CLOCK = Clock()
"""The one counter of this process, which every compiled graph reads."""


class Scheduled:
    """A graph compiled once per phase of the schedule; a forward runs the phase it falls into."""

    def __init__(self, phases: Sequence[Phase], compiled: Mapping[int, Callable[..., Any]]) -> None:
        """``compiled``: one function by g_x bits, all of one calling convention."""
        self._phases = tuple(phases)
        self._compiled = dict(compiled)
        CLOCK.count()

    def __call__(self, *args: Any) -> Any:
        """One forward at the clock's step."""
        return self._compiled[current_bits(self._phases)](*args)


def bits_at(phases: Sequence[Phase], step: int) -> int:
    """g_x bits of the phase that ``step`` (from 0) falls into."""
    for phase in phases:
        if phase.until_step is None or step < phase.until_step:
            return phase.gx_bits
    return phases[-1].gx_bits


def current_bits(phases: Sequence[Phase]) -> int:
    """g_x bits of the phase that training is in now."""
    return bits_at(phases, CLOCK.step)


def set_step(step: int) -> None:
    """Say which step training is at, e.g. from a callback of your trainer."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise OptionError.value("step", step, "a whole number >= 0")
    CLOCK.set(step)


def state_dict() -> dict[str, int]:
    """What a checkpoint needs, so that a resumed run goes on in the same phase."""
    return {"version": STATE_VERSION, "step": CLOCK.step}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Go on where ``state_dict`` was taken.

    Raises:
        OptionError: not a state of this version.
    """
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        expected = f"what hot_compile.state_dict() of version {STATE_VERSION} gave"
        raise OptionError.value("state", state, expected)
    set_step(state.get("step", -1))
