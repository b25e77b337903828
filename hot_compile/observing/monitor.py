"""Opt-in watch on gradient quality: every N steps, how far each layer's gradients are from exact.

    monitor = hot_compile.Monitor(path="quality.jsonl", budget=0.5)
    step = torch.compile(model, backend="hot", options={"monitor": monitor})

A watched step is a usual one, after whose backward an exact twin of it runs (``watching``). Told
are what each layer's own strategy loses, and how far the gradient of every parameter is from exact
in the step as it ran, stored activations included. What leaves its budget is done more exactly from
then on: the graph is compiled once more. Where no layer's strategy is to blame, the next step is
watched, too, with what is stored for the backward, and the tensors found to blame get more bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from hot_compile.config import BASELINES, HotConfig, Memory, Strategy
from hot_compile.errors import OptionError
from hot_compile.observing.auto import forget
from hot_compile.observing.raising import Stored, bits_by_tensor, raised_bits
from hot_compile.passes.layers.plan import Decision
from hot_compile.passes.measure.conv import exact_conv_gradients, quantised_conv_gradients
from hot_compile.passes.measure.linear import (
    compare,
    compare_product,
    exact_grad_weight,
    quantised_grad_input,
    quantised_grad_weight,
)
from hot_compile.passes.measure.observe import Layer, Observer
from hot_compile.passes.measure.stored import Fed

log = logging.getLogger("hot_compile")

_UNTOUCHED = BASELINES | {Strategy.EXACT}
_OWN = frozenset({"g_x", "g_w"})
_FINER: Mapping[str, Mapping[str, Any]] = {
    "of an exact forward": {"forward": "exact"},
    "in 8 bits": {"forward": "exact", "memory_bits": 8},
    "exactly": {"forward": "exact", "memory": Memory.OFF},
}
"""Rungs towards an exact forward and exact storage: what is said of each of what is stored, and the
options it changes."""


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

Qualities = Mapping[str, Mapping[str, Quality]]
"""{layer: {"g_x" or "g_w": of its own strategy alone, "weight.grad": of the whole step}}, and
{parameter: {"grad": of the whole step}} for what is no layer's weight."""


@dataclasses.dataclass
class Monitor:
    """What to watch and where to tell it: give one to option ``monitor``."""

    every: int = 100
    """Watch every so many forwards of a graph."""
    budget: float | None = None
    """Make a layer exact whose g_x or g_w error exceeds this. If none does, but the whole error of
    a layer's weight: store the tensors in more bits whose storing takes more than its share of it.
    If there is none: give the graph an exact forward, store its activations in 8 bits, then
    exactly, then make all layers exact. None: only watch."""
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
    """Layers that left the budget, with what they measured; ``*`` stands for all."""
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers whose graph stores its activations more exactly because of them, how, and why."""
    raised: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that are stored in more bits, by their names in a profile: how many, and why."""

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
        self._check_raised()

    def _check_raised(self) -> None:
        try:
            list(bits_by_tensor(self.raised))
        except (AttributeError, ValueError):
            expected = "a dict {tensor: '8 bits: why' or 'exact: why'}, as another Monitor has it"
            raise OptionError.value("raised", self.raised, expected) from None

    def _check_budget(self) -> None:
        number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        if self.budget is not None and not (number and self.budget > 0):
            raise OptionError.value("budget", self.budget, "a relative error > 0, or None")

    def applied(self, config: HotConfig, names: Sequence[str | None]) -> HotConfig:
        """The configuration for the graph of these parameters, after what was found so far."""
        layers = {_layer_of(name) for name in names if name}
        for name in self.stored.keys() & layers:
            rung = _FINER[self.stored[name].split(":")[0]]
            config = dataclasses.replace(config, **rung)
        exact = tuple((name, Strategy.EXACT) for name in self.demoted)
        bits = (*config.memory_override, *bits_by_tensor(self.raised))
        return dataclasses.replace(
            config, override=(*config.override, *exact), memory_override=bits
        )

    def doubts(self, found: Qualities, config: HotConfig) -> bool:
        """A layer's weight left the budget, and what the graph stores may be to blame for it."""
        return bool(self._left(found)) and config.memory is not Memory.OFF

    def tell(
        self,
        step: int,
        found: Qualities,
        config: HotConfig | None = None,
        stored: Mapping[str, Stored] | None = None,
    ) -> bool:
        """Report what was found; True if it changes how a graph is to be compiled.

        A failing sink is logged and dropped: watching must not stop a training run.

        Args:
            step: forwards so far. found: what was seen since the last call.
            config: how the graph was compiled, if all its layers' strategies were measured since;
                None: a whole error is not yet anybody's fault.
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
        if self._demote(step, found):
            return True
        if config is None or not self._left(found):
            return False
        return self._raise(step, found, stored or {}) or self._refine(step, found, config)

    def _demote(self, step: int, found: Qualities) -> bool:
        """Make layers exact whose own strategy leaves the budget."""
        own = {
            name: max((q.error for side, q in sides.items() if side in _OWN), default=0.0)
            for name, sides in found.items()
        }
        left = [name for name, worst in own.items() if self._over(worst)]
        new = [name for name in left if name not in self.demoted]
        for name in new:
            self.demoted[name] = f"error {own[name]:.3g} over budget {self.budget:g} at step {step}"
            log.warning("hot: %s stays exact from now on: %s", name, self.demoted[name])
        return bool(new)

    def _left(self, found: Qualities) -> dict[str, float]:
        """Whole errors of the layers' weights that left the budget."""
        whole = {name: sides[WHOLE].error for name, sides in found.items() if WHOLE in sides}
        left = {name: error for name, error in whole.items() if self._over(error)}
        return {} if "*" in self.demoted else left

    def _reason(self, step: int, found: Qualities) -> str:
        left = self._left(found)
        worst = max(left, key=lambda name: left[name])
        why = f"whole error of {worst}'s weight {left[worst]:.3g}, its own within "
        return why + f"budget {self.budget:g}, at step {step}"

    def _raise(self, step: int, found: Qualities, stored: Mapping[str, Stored]) -> bool:
        """No strategy is to blame: give tensors more bits whose storing is."""
        assert self.budget is not None
        why = self._reason(step, found)
        new = raised_bits(stored, self.budget, self.raised)
        for name, text in new.items():
            self.raised[name] = f"{text}; {why}"
            log.warning("hot: %s is stored more finely from now on: %s", name, self.raised[name])
        return bool(new)

    def _refine(self, step: int, found: Qualities, config: HotConfig) -> bool:
        """Nobody alone is to blame: take the next rung towards exact for graphs that are off."""
        left, why = self._left(found), self._reason(step, found)
        rung = next((text for text, change in _FINER.items() if _changes(config, change)), None)
        if rung is None:
            self.demoted["*"] = why
            log.warning("hot: every layer stays exact from now on: %s", why)
            return True
        self.stored.update(dict.fromkeys(left, f"{rung}: {why}"))
        log.warning("hot: activations of this graph are stored %s from now on: %s", rung, why)
        return True

    def _over(self, error: float) -> bool:
        return self.budget is not None and error > self.budget

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


def _layer_of(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _changes(config: HotConfig, change: Mapping[str, Any]) -> bool:
    """The change would compute or store anything more exactly."""
    if config.forward != "exact":
        return True
    if config.memory is Memory.OFF:
        return False
    return "memory" in change or (config.memory_bits or 0) < change.get("memory_bits", 0)


class Gauge(Observer):
    """Measures each layer's own strategy, and reads nothing back before asked.

    With ``wants_stored``: what storing each tensor does, too.

    ``rotate``: every so many layers take turns, from one :meth:`read` to the next.
    """

    def __init__(self, rotate: int) -> None:
        self.wants_stored = False
        self._rotate = rotate
        self._turn = 0
        self._places: dict[str, int] = {}
        self._layers: set[str] = set()
        self._pending: list[tuple[str, str, Tensor]] = []
        self._told: list[tuple[Fed, dict[str, Tensor]]] = []

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Measure one layer, unless it is exact anyway."""
        d = layer.decision
        self._layers.add(layer.name)
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

    def gradient(self, name: str, figures: Tensor) -> None:
        """Keep one parameter's whole error, under its layer if it is a layer's weight."""
        layer = _layer_of(name)
        weight = layer != name and layer in self._layers
        self._pending.append((layer, WHOLE, figures) if weight else (name, "grad", figures))

    def stored(self, fed: Fed, operands: Sequence[Tensor]) -> None:
        """Measure what storing one tensor does, unless memory is too short for that."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._told.append((fed, fed.errors(operands)))

    def read_stored(self) -> dict[str, Stored]:
        """What crossed in the backwards since the last call, as far as that was measured."""
        told, self._told = self._told, []
        return {fed.name: Stored(fed.scheme, fed.measures(errors)) for fed, errors in told}

    @property
    def complete(self) -> bool:
        """Every layer's strategy had its turn."""
        return self._turn >= min(self._rotate, len(self._places))

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
        config: HotConfig | None = None,
    ) -> None:
        """``config``: how ``usual`` was compiled."""
        self._usual = usual
        self._observed = observed
        self._gauge = gauge
        self._monitor = monitor
        self._code = code
        self._config = config
        self._calls = 0
        self._again = False

    def __call__(self, *args: Any) -> Any:
        """One forward; what the last watched backward showed is read here."""
        found = self._gauge.read()
        if found:
            self._judge(found)
        self._calls += 1
        watched = self._again or self._calls % self._monitor.every == 0
        self._again = False
        return (self._observed if watched else self._usual)(*args)

    def _judge(self, found: Qualities) -> None:
        """Report; where storage may be to blame, look at that before anything is changed."""
        gauge, monitor = self._gauge, self._monitor
        config, stored = self._config if gauge.complete else None, gauge.read_stored()
        unsure = config is not None and not gauge.wants_stored and monitor.doubts(found, config)
        changed = monitor.tell(self._calls, found, None if unsure else config, stored)
        if changed:
            forget(self._code)
        gauge.wants_stored = self._again = unsure and not changed


def monitor_of(options: Mapping[str, Any]) -> Monitor | None:
    """Option ``monitor``, if there is one.

    Raises:
        OptionError: it is no Monitor.
    """
    monitor = options.get("hot.monitor", options.get("monitor"))
    if monitor is not None and not isinstance(monitor, Monitor):
        raise OptionError.value("monitor", monitor, "a hot_compile.Monitor(...), or None")
    return monitor
