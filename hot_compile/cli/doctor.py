"""``hot-compile doctor``: what is found; tries to write to folders, to run a training step."""

from __future__ import annotations

import functools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

from hot_compile import __version__
from hot_compile.errors import BuildError
from hot_compile.progress import progress
from hot_compile.runtime.native import build as building
from hot_compile.runtime.native.providers import Provider, status
from hot_compile.tables import PlainTable

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
    from hot_compile.backend import hot  # with Inductor, which other commands need not wait for
    from hot_compile.record import Reports

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


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Say what is found, run a small training step on it. Exit code 1 if no device is ready."""
    rows = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _compiler(),
        "operators' cache": _folder(building.cache_dir(), "XDG_CACHE_HOME"),
        "Inductor's cache": _folder(inductors_cache(), "TORCHINDUCTOR_CACHE_DIR"),
    }
    kinds, ready = ("cpu", "cuda"), []
    with progress(len(kinds)) as begin:
        for kind in kinds:
            begin(f"running a training step on {kind}")
            rows[kind], works = _device(status(kind))
            ready += [kind] * works
    end = f"Ready: {', '.join(ready)}." if ready else "Nothing is ready: every layer stays exact."
    if not torch.cuda.is_available():
        end += " There is no GPU that torch finds."
    if as_json:
        print(json.dumps({"version": __version__, **rows, "ready": ready}, indent=1))
    else:
        table = PlainTable(f"hot-compile {__version__}", "what", "found")
        for row in rows.items():
            table.add(*row)
        Console().print(table, Text(end, style="green" if ready else "red"))
    if not ready:
        raise typer.Exit(1)


def _folder(folder: Path, variable: str) -> str:
    problem = unwritable(folder)
    told = f"cannot be written ({problem}); set {variable} to a folder that can"
    return f"{folder}: {told}" if problem else str(folder)


def _device(provider: Provider) -> tuple[str, bool]:
    """What is said of a device, and whether a training step ran there."""
    facts = provider.reason or "built on first use"
    if not provider.available:
        if provider.device_type == "cuda" and not torch.cuda.is_available():
            return f"not needed, torch finds no GPU; to build for one: {facts}", False
        return f"missing: {facts}", False
    if provider.device_type == "cuda" and not torch.cuda.is_available():
        return f"not ready, torch finds no GPU; {facts}", False
    start = time.perf_counter()
    if problem := tried(provider.device_type):
        return f"not ready, a training step failed: {problem}; {facts}", False
    seconds = time.perf_counter() - start
    return f"ready, a training step ran in {seconds:.0f} s, compiling included; {facts}", True


def _compiler() -> str:
    try:
        return " ".join(building.find_compiler())
    except BuildError as error:
        return str(error)
