"""Calibration: what each strategy's error would be, layer by layer, on your model and your data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, fx, nn

from .backend import hot
from .config import HotConfig, split_options
from .errors import CalibrationError
from .observing.collector import Collector
from .passes.cost.devices import pricing
from .passes.profile.profile import Profile
from .stand_in import compiled_by, laid_over
from .unchanged import reached, unchanged

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

    Runs forward and backward on a few batches as training would, and beside each of them an exact
    twin. Per layer, the real operators are measured on the twin's operands; per parameter, the
    gradient of the whole step (layers rewritten, activations stored compressed, as ``options`` say)
    is compared with the twin's. The model's parameters, buffers, ``.grad`` fields and the random
    state are left as they were; no optimizer is involved. Gradients at initialisation say little
    about later ones (HLA looks harmless there): calibrate a model that has trained for a few
    hundred steps.

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
        CalibrationError: no batch, no layer with a finite, non-zero gradient, no runtime for the
            model's device, or a graph that could not be observed.
    """
    found = reached(model)
    _refuse_without_runtime(model)
    config = HotConfig.from_options(split_options(options)[0])
    collector = Collector(config.rank)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Any:
        return hot(gm, example_inputs, observer=collector, **laid_over(options, asked))

    with (
        unchanged(found),
        torch.enable_grad(),
        compiled_by(model, found, backend) as observed,
        Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
    ):
        row = bar.add_task("calibrating", total=limit)
        for batch in itertools.islice(batches, limit):
            loss_fn(observed, batch).backward()
            collector.flush()
            model.zero_grad(set_to_none=True)
            bar.update(row, advance=1)
    if collector.problem is not None:
        raise CalibrationError(
            f"got a model that could not be observed ({collector.problem}); expected every graph "
            "to run exactly beside the usual one. Free memory or use smaller batches if that was "
            "the problem, else exclude the layer or report it."
        )
    return collector.profile()


def _refuse_without_runtime(model: nn.Module) -> None:
    for device in sorted({str(p.device) for p in model.parameters()}):
        rates = pricing(torch.device(device))
        if isinstance(rates, str):
            raise CalibrationError(
                f"got a model on {device}, where HOT's operators cannot run ({rates}); expected "
                "them, to measure what they give. `hot-compile doctor` says what is missing."
            )
