"""An observer that measures every strategy on every layer, and makes a profile of it."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from hot_compile.errors import CalibrationError
from hot_compile.passes.base.site import Site
from hot_compile.passes.measure.conv import (
    Pairs,
    conv_granule_errors,
    conv_measures,
)
from hot_compile.passes.measure.linear import (
    compare,
    forward_measures,
    grad_input_measures,
    grad_weight_measures,
    granule_errors,
)
from hot_compile.passes.measure.observe import Layer, Observer
from hot_compile.passes.measure.stored import Fed
from hot_compile.passes.profile.profile import (
    SIDES,
    LayerProfile,
    Measure,
    Profile,
    StorageMeasure,
)

_DIGITS = 4
"""Significant digits of a profile's figures: what a few batches tell, and diffs stay readable."""


class Collector(Observer):
    """Measures every layer and every stored tensor it is shown, and averages over batches."""

    wants_stored = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: list[tuple[Layer, int, dict[str, Tensor]]] = []
        self._found: dict[str, list[dict[str, float]]] = {}
        self._layers: dict[str, tuple[Layer, int]] = {}
        self._compared: list[tuple[str, Tensor]] = []
        self._gradients: dict[str, list[list[float]]] = {}
        self._told: list[tuple[Fed, dict[str, Tensor]]] = []
        self._storage: dict[str, list[dict[str, StorageMeasure]]] = {}
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
        y = {} if x is None or weight is None else forward_measures(x, weight)
        return _figures(gx, gw, granule_errors(g, self._rank), y)

    def _measure_convolution(
        self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None
    ) -> dict[str, Tensor]:
        assert layer.site is not None
        assert weight is not None
        assert x is not None
        gx, gw = conv_measures(layer.site, g, weight, x, self._rank)
        return _figures(gx, gw, conv_granule_errors(g, self._rank), {})

    def gradient(self, name: str, got: Tensor, want: Tensor) -> None:
        """Keep (error, cosine) of one parameter's gradient as the step has it."""
        self._compared.append((name, torch.stack(compare(got, want))))

    def stored(self, fed: Fed, operands: Sequence[Tensor]) -> None:
        """Measure what storing one tensor does; nothing is read back before :meth:`flush`."""
        self._told.append((fed, fed.errors(operands)))

    @property
    def sites(self) -> list[Site]:
        """The layers shown so far, as the plan knows them."""
        return [layer.site for layer, _ in self._layers.values() if layer.site is not None]

    def clear(self) -> None:
        """Forget everything collected so far."""
        self._pending.clear()
        self._found.clear()
        self._layers.clear()
        self._compared.clear()
        self._gradients.clear()
        self._told.clear()
        self._storage.clear()

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
        for name, pair in self._compared:
            values = pair.tolist()
            if all(map(math.isfinite, values)):
                self._gradients.setdefault(name, []).append(values)
        self._compared.clear()
        for fed, errors in self._told:
            measures = fed.measures(errors)
            if measures:
                self._storage.setdefault(fed.name, []).append(measures)
        self._told.clear()

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
        gradients = {name: _mean_measure(pairs) for name, pairs in self._gradients.items()}
        environment = _environment(self._device)
        storage = {name: _mean_storage(seen) for name, seen in self._storage.items()}
        return Profile(self._rank, layers, environment, gradients=gradients, storage=storage)


def _figures(
    gx: Pairs,
    gw: Pairs,
    granules: tuple[Tensor, Tensor],
    forward: Pairs,
) -> dict[str, Tensor]:
    """All that was measured of a layer in one backward, by the path of its place in a profile."""
    figures: dict[str, Tensor] = {}
    for side, variants in zip(SIDES, (gx, gw, forward), strict=True):
        for variant, (error, cosine) in variants.items():
            figures[f"{side} {variant} error"] = error
            figures[f"{side} {variant} cosine"] = cosine
    figures["token_error"], figures["tensor_error"] = granules
    return figures


def _average(layer: Layer, rows: int, found: list[dict[str, float]]) -> LayerProfile:
    mean = {key: _rounded(statistics.fmean(row[key] for row in found)) for key in found[0]}
    sides: dict[str, dict[str, dict[str, float]]] = {name: {} for name in SIDES}
    for key, value in mean.items():
        parts = key.split(" ")
        if len(parts) == 3:
            sides[parts[0]].setdefault(parts[1], {})[parts[2]] = value
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
        forward={key: Measure(**value) for key, value in sides["forward"].items()},
    )


def _mean_measure(pairs: list[list[float]]) -> Measure:
    error, cosine = (_rounded(statistics.fmean(column)) for column in zip(*pairs, strict=True))
    return Measure(error, cosine)


def _mean_storage(seen: list[dict[str, StorageMeasure]]) -> dict[str, StorageMeasure]:
    def mean(scheme: str, field: str) -> float:
        return _rounded(statistics.fmean(getattr(found[scheme], field) for found in seen))

    return {s: StorageMeasure(mean(s, "error"), mean(s, "passed")) for s in seen[0]}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _environment(device: torch.device) -> dict[str, str]:
    from hot_compile import __version__

    cuda = device.type == "cuda"
    return {
        "hot_compile": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
    }
