"""Opt-in watch on gradient quality: every N steps, how far each layer's gradients are from exact.

    monitor = hot_compile.Monitor( path="quality.jsonl", budget=0.5)
    step = torch.compile(model, backend="hot", options={"monitor": monitor})

A watched step computes exact gradients, run op by op, and beside them what the layer's own strategy
would have given. A layer that leaves its budget becomes exact: the graph is compiled once more.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from .auto import forget
from .config import BASELINES, HotConfig, Strategy
from .errors import OptionError
from .passes.measure import compare, quantised_grad_input, quantised_grad_weight
from .passes.measure_conv import exact_conv_gradients, quantised_conv_gradients
from .passes.observe import Layer
from .passes.plan import Decision

log = logging.getLogger("hot_compile")

_UNTOUCHED = BASELINES | {Strategy.EXACT}


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


Qualities = Mapping[str, Mapping[str, Quality]]
"""{layer: {"g_x" or "g_w": quality}}."""


@dataclasses.dataclass
class Monitor:
    """What to watch and where to tell it: give one to option ``monitor``."""

    every: int = 100
    """Watch every so many forwards of a graph."""
    budget: float | None = None
    """Make a layer exact whose g_x or g_w error exceeds this; None: only watch."""
    rotate: int = 4
    """Measure every so many layers per watched step, all of them in turn; 1: all at once."""
    path: str | Path | None = None
    """File to append a JSON line to per watched step."""
    writer: Any = None
    """A TensorBoard ``SummaryWriter``, or anything with its ``add_scalar(name, value, step)``."""
    callback: Callable[[int, Qualities], None] | None = None
    """Called with (forwards so far, qualities)."""
    demoted: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers that left the budget, with what they measured."""

    def __post_init__(self) -> None:
        for name in ("every", "rotate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError.value(name, value, "a whole number >= 1")
        self._check_budget()
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise OptionError.value("path", self.path, "a path, or None")
        if self.writer is not None and not callable(getattr(self.writer, "add_scalar", None)):
            raise OptionError.value("writer", self.writer, "an object with add_scalar, or None")
        if self.callback is not None and not callable(self.callback):
            expected = "a function of (forwards so far, qualities), or None"
            raise OptionError.value("callback", self.callback, expected)
        if not isinstance(self.demoted, dict):
            raise OptionError.value("demoted", self.demoted, "a dict {layer: why}")

    def _check_budget(self) -> None:
        number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        if self.budget is not None and not (number and self.budget > 0):
            raise OptionError.value("budget", self.budget, "a relative error > 0, or None")

    def applied(self, config: HotConfig) -> HotConfig:
        """The configuration with demoted layers exact."""
        exact = tuple((name, Strategy.EXACT) for name in self.demoted)
        return dataclasses.replace(config, override=(*config.override, *exact))

    def tell(self, step: int, found: Qualities) -> bool:
        """Report what was found; True if it demoted a layer.

        A failing sink is logged and dropped: watching must not stop a training run.
        """
        for sink in (self._to_file, self._to_writer, self.callback):
            if sink is None:
                continue
            try:
                sink(step, found)
            except Exception:
                log.warning("hot: monitor could not report step %d", step, exc_info=True)
        left = {name: worst for name, worst in _worst(found).items() if self._over(worst)}
        new = {name: text for name, text in left.items() if name not in self.demoted}
        for name, worst in new.items():
            self.demoted[name] = f"error {worst:.3g} over budget {self.budget:g} at step {step}"
            log.warning("hot: %s stays exact from now on: %s", name, self.demoted[name])
        return bool(new)

    def _over(self, error: float) -> bool:
        return self.budget is not None and error > self.budget

    def _to_file(self, step: int, found: Qualities) -> None:
        if self.path is None:
            return
        layers = {
            name: {side: dataclasses.asdict(quality) for side, quality in sides.items()}
            for name, sides in found.items()
        }
        with Path(self.path).open("a") as file:
            file.write(json.dumps({"step": step, "layers": layers}) + "\n")

    def _to_writer(self, step: int, found: Qualities) -> None:
        if self.writer is None:
            return
        for name, sides in found.items():
            for side, quality in sides.items():
                self.writer.add_scalar(f"hot/{side} cosine/{name}", quality.cosine, step)
                self.writer.add_scalar(f"hot/{side} SNR/{name}", quality.snr, step)


def _worst(found: Qualities) -> dict[str, float]:
    return {name: max(q.error for q in sides.values()) for name, sides in found.items() if sides}


class Gauge:
    """An observer that measures each layer's own strategy, and reads nothing back before asked.

    ``rotate``: every so many layers take turns, from one :meth:`read` to the next.
    """

    def __init__(self, rotate: int) -> None:
        self._rotate = rotate
        self._turn = 0
        self._places: dict[str, int] = {}
        self._pending: list[tuple[str, str, Tensor]] = []

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Measure one layer, unless it is exact anyway."""
        d = layer.decision
        if d is None or d.strategy in _UNTOUCHED:
            return
        place = self._places.setdefault(layer.name, len(self._places))
        period = min(self._rotate, len(self._places))
        if place % period != self._turn % period:
            return
        with torch.no_grad():
            if layer.convolves:
                self._convolution(layer, d, g, weight, x)
                return
            if weight is not None:
                got = quantised_grad_input(g, weight, d.gx_bits, d.per_channel, d.per_token)
                self._keep(layer.name, "g_x", got, g.float() @ weight.float())
            if x is not None and d.strategy is not Strategy.GX_ONLY:
                got = quantised_grad_weight(g, x, d.strategy, d.rank, d.tokens, d.per_channel)
                self._keep(layer.name, "g_w", got, g.float().t() @ x.float())

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
                self._keep(layer.name, side, mine, theirs)

    def _keep(self, name: str, side: str, got: Tensor, want: Tensor) -> None:
        self._pending.append((name, side, torch.stack(compare(got, want))))

    def read(self) -> dict[str, dict[str, Quality]]:
        """What the backwards since the last call showed; what is not finite is left out."""
        pending, self._pending = self._pending, []
        self._turn += bool(pending)
        found: dict[str, dict[str, Quality]] = {}
        for name, side, figures in pending:
            error, cosine = figures.tolist()
            if math.isfinite(error) and math.isfinite(cosine):
                found.setdefault(name, {})[side] = Quality(error, cosine)
        return found


class Watched:
    """A compiled graph of which every N-th forward and backward is watched."""

    def __init__(
        self,
        usual: Callable[..., Any],
        observed: Callable[..., Any],
        gauge: Gauge,
        monitor: Monitor,
        code: CodeType | None,
    ) -> None:
        self._usual = usual
        self._observed = observed
        self._gauge = gauge
        self._monitor = monitor
        self._code = code
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        """One forward; what the last watched backward showed is read here."""
        found = self._gauge.read()
        if found and self._monitor.tell(self._calls, found):
            forget(self._code)
        self._calls += 1
        watched = self._calls % self._monitor.every == 0
        return (self._observed if watched else self._usual)(*args)


def monitor_of(options: Mapping[str, Any]) -> Monitor | None:
    """Option ``monitor``, if there is one.

    Raises:
        OptionError: it is no Monitor.
    """
    monitor = options.get("hot.monitor", options.get("monitor"))
    if monitor is not None and not isinstance(monitor, Monitor):
        raise OptionError.value("monitor", monitor, "a hot_compile.Monitor(...), or None")
    return monitor
