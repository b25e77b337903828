"""What ``hot-compile doctor`` tries: to write to folders, to run a small training step."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALWAYS = {"min_gain": 0, "keep_head": False, "accept": "off"}
_LEAST = 0.95
"""Of the cosine of a gradient with eager's; 8 bits leave 0.999 and more."""


def unwritable(folder: Path) -> str:
    """Why nothing can be written to ``folder``, which is made if need be; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return str(error)
    return ""


def inductors_cache() -> Path:
    """Where Inductor keeps what it compiled. It cannot even be imported if that cannot be made."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named and unwritable(Path(named)):
        return Path(named)
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # seconds, wanted here only

    return Path(cache_dir())


def tried(device_type: str) -> str:
    """What is wrong with a training step through the backend there; empty if nothing is."""
    try:
        return _tried(device_type)
    except Exception as error:  # whatever it is, it is what a user would meet
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _tried(device_type: str) -> str:
    from .backend import hot  # with Inductor, which other commands need not wait for
    from .record import Reports

    reports, generator = Reports(), torch.Generator().manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
    model = nn.Sequential(*layers).to(device_type)
    x = torch.randn(128, 64, generator=generator).to(device_type)
    backend = functools.partial(hot, recorder=reports, options=_ALWAYS)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend=backend)
        exact, found = (_gradients(run, list(model.parameters()), x) for run in (model, compiled))
    finally:
        torch._dynamo.reset()
    count = sum(len(graph.plan.rewritten) for graph in reports.graphs)
    if count != 2:
        why = {d.reason for graph in reports.graphs for d in graph.plan if d.reason}
        return f"{count} of 2 layers were rewritten: {'; '.join(sorted(why))}"
    least = min(F.cosine_similarity(a, b, 0).item() for a, b in zip(exact, found, strict=True))
    return "" if least > _LEAST else f"a gradient's cosine with eager's is {least:.3f}"


def _gradients(
    run: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor
) -> list[Tensor]:
    found = torch.autograd.grad(run(x).square().mean(), parameters)
    return [gradient.flatten() for gradient in found]
