"""Calibration: what each strategy's error would be, layer by layer, on your model and your data."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from .config import HotConfig, split_options
from .errors import CalibrationError
from .inspect import run_uncompiled
from .passes.measure import grad_input_measures, grad_weight_measures, granule_errors, tensor_stats
from .passes.measure_conv import Pairs, conv_granule_errors, conv_measures, conv_stats
from .passes.observe import Layer
from .passes.profile import LayerProfile, Measure, Profile, TensorStats
from .passes.site import Site

_DIGITS = 4
"""Significant digits of a profile's figures: what a few batches tell, and diffs stay readable."""

LossFunction = Callable[[Any, Any], Tensor]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    options: Mapping[str, Any] | None = None,
    limit: int = 4,
    progress: bool = True,
) -> Profile:
    """Measure, per layer and per strategy, how far g_x and g_w would be from exact.

    Runs forward and backward on a few batches with exact gradients and, beside them, with the real
    operators. The model's parameters, buffers, ``.grad`` fields and the random state are left as
    they were; no optimizer is involved. Gradients at initialisation say little about later ones
    (HLA looks harmless there): calibrate a model that has trained for a few hundred steps.

    Args:
        model: an ``nn.Module`` in training mode, on the device it trains on.
        batches: anything to iterate; at most ``limit`` of its items are taken.
        loss_fn: ``loss_fn(model, batch)`` gives the scalar loss as in training: enter autocast and
            scale the loss there if training does.
        options: as for ``torch.compile``; ``rank`` decides which HLA is measured.
        limit: how many batches. progress: show a progress bar on stderr.

    Returns:
        A :class:`Profile`: ``profile.save(path)``, then ``options={"profile": path}``.

    Raises:
        CalibrationError: no batch, or no layer with a finite, non-zero gradient.
    """
    from .backend import hot  # keeps `import hot_compile` light

    model = getattr(model, "_orig_mod", model)
    config = HotConfig.from_options(split_options(options)[0])
    collector = Collector(config.rank)
    backend = functools.partial(
        hot,
        options={"recipe": "exact", "rank": config.rank},
        observer=collector,
        inner_compile=run_uncompiled,
    )
    with (
        _as_found(model),
        torch.enable_grad(),
        Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
    ):
        observed = torch.compile(model, backend=backend)
        row = bar.add_task("calibrating", total=limit)
        for batch in itertools.islice(batches, limit):
            loss_fn(observed, batch).backward()
            collector.flush()
            model.zero_grad(set_to_none=True)
            bar.update(row, advance=1)
    return collector.profile()


class Collector:
    """An observer that measures every layer it is shown and averages over batches."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: list[tuple[Layer, int, dict[str, Tensor]]] = []
        self._found: dict[str, list[dict[str, float]]] = {}
        self._layers: dict[str, tuple[Layer, int]] = {}
        self._device = torch.device("cpu")

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Measure one layer's backward; nothing is read back before :meth:`flush`."""
        self._device = g.device
        rows = g.numel() // g.shape[1] if layer.convolves else g.shape[0]
        measure = self._measure_convolution if layer.convolves else self._measure
        with torch.no_grad():
            self._pending.append((layer, rows, measure(layer, g, weight, x)))

    def _measure(
        self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None
    ) -> dict[str, Tensor]:
        gx = {} if weight is None else grad_input_measures(g, weight)
        gw = {} if x is None else grad_weight_measures(g, x, self._rank, layer.tokens)
        operands = {"x": x, "weight": weight, "grad_output": g}
        stats = {
            name: tensor_stats(tensor, self._rank)
            for name, tensor in operands.items()
            if tensor is not None
        }
        return _figures(gx, gw, granule_errors(g, self._rank), stats)

    def _measure_convolution(
        self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None
    ) -> dict[str, Tensor]:
        assert layer.site is not None
        assert weight is not None
        assert x is not None
        gx, gw = conv_measures(layer.site, g, weight, x, self._rank)
        stats = conv_stats(g, weight, x, self._rank)
        return _figures(gx, gw, conv_granule_errors(g, self._rank), stats)

    @property
    def sites(self) -> list[Site]:
        """The layers shown so far, as the plan knows them."""
        return [layer.site for layer, _ in self._layers.values() if layer.site is not None]

    def clear(self) -> None:
        """Forget everything collected so far."""
        self._pending.clear()
        self._found.clear()
        self._layers.clear()

    @property
    def batches(self) -> int:
        """Usable backwards of the layer that has the fewest."""
        return min((len(rows) for rows in self._found.values()), default=0)

    def flush(self) -> None:
        """Read the pending figures; a layer with any that is not finite skips this batch."""
        for layer, rows, figures in self._pending:
            values = torch.stack([value.float() for value in figures.values()]).tolist()
            self._layers[layer.name] = (layer, rows)
            found = self._found.setdefault(layer.name, [])
            if all(map(math.isfinite, values)):
                found.append(dict(zip(figures, values, strict=True)))
        self._pending.clear()

    def profile(self) -> Profile:
        """The averages of everything collected.

        Raises:
            CalibrationError: nothing was.
        """
        layers = {
            name: _average(*self._layers[name], rows) for name, rows in self._found.items() if rows
        }
        if not layers:
            raise CalibrationError(
                f"got {len(self._found)} layers, none with a finite, non-zero gradient; expected "
                "at least one batch whose loss depends on the model's Linear layers. Pass batches "
                "and a loss as in training (and scale the loss if training does)."
            )
        return Profile(self._rank, layers, _environment(self._device))


def _figures(
    gx: Pairs, gw: Pairs, granules: tuple[Tensor, Tensor], stats: dict[str, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """All that was measured of a layer in one backward, by the path of its place in a profile."""
    figures: dict[str, Tensor] = {}
    for side, variants in (("grad_input", gx), ("grad_weight", gw)):
        for variant, (error, cosine) in variants.items():
            figures[f"{side} {variant} error"] = error
            figures[f"{side} {variant} cosine"] = cosine
    figures["token_error"], figures["tensor_error"] = granules
    for name, found in stats.items():
        figures.update({f"stats {name} {key}": value for key, value in found.items()})
    return figures


def _average(layer: Layer, rows: int, found: list[dict[str, float]]) -> LayerProfile:
    mean = {key: _rounded(statistics.fmean(row[key] for row in found)) for key in found[0]}
    sides: dict[str, dict[str, dict[str, float]]] = {"grad_input": {}, "grad_weight": {}}
    stats: dict[str, dict[str, float]] = {}
    for key, value in mean.items():
        parts = key.split(" ")
        if len(parts) == 3:
            target = stats if parts[0] == "stats" else sides[parts[0]]
            target.setdefault(parts[1], {})[parts[2]] = value
    return LayerProfile(
        outputs=layer.outputs,
        inputs=layer.inputs,
        rows=rows,
        dtype=layer.dtype,
        batches=len(found),
        grad_input={key: Measure(**value) for key, value in sides["grad_input"].items()},
        grad_weight={key: Measure(**value) for key, value in sides["grad_weight"].items()},
        token_error=mean["token_error"],
        tensor_error=mean["tensor_error"],
        stats={key: TensorStats(**value) for key, value in stats.items()},
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _environment(device: torch.device) -> dict[str, str]:
    from . import __version__

    cuda = device.type == "cuda"
    return {
        "hot_compile": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
    }


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and random states back, and forget the compilations made inside."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    torch._dynamo.reset()
    try:
        with torch.random.fork_rng(devices=sorted(d.index or 0 for d in devices)):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        torch._dynamo.reset()
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
