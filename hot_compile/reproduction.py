"""A folder with what it takes to see a failure again: code, options, versions, sizes; no data."""

from __future__ import annotations

import hashlib
import platform
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .config import OBJECTS
from .passes.base.graph import readable
from .passes.base.site import hint
from .passes.pipeline import sources_hash
from .runtime.native.build import cache_dir

_PROGRAM = '''"""{cause}

torch {torch}, hot-compile {sources}, Python {python}, {machine}
"""

import torch
from torch import device, inf, nan  # graphs name them


{code}


def tensor(size, stride, dtype, device, requires_grad):
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    made = made.normal_() if made.is_floating_point() else made.zero_()
    return made.requires_grad_(requires_grad)


torch.manual_seed(0)
inputs = [
{inputs}
]
{asked}
compiled = torch.compile({name}(), backend="hot", **asked)
outputs = compiled(*inputs)
sum(x.float().sum() for x in outputs if torch.is_tensor(x) and x.requires_grad).backward()
'''


def cause(error: BaseException) -> str:
    """Type and first line of what went wrong, without what torch wraps it in."""
    error = getattr(error, "inner_exception", None) or error
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def write_reproduction(
    gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Mapping[str, Any], error: Exception
) -> str:
    """Write ``repro.py`` and ``error.txt`` to a folder in the user's cache; says where.

    The same failure of the same graph has the same folder. Never raises: there is none then.

    Args:
        gm: Dynamo's graph. example_inputs: what it was compiled for.
        asked: ``mode`` and ``options`` of torch.compile.
    """
    try:
        program = _program(gm, example_inputs, asked, error)
        digest = hashlib.sha256(program.encode()).hexdigest()[:16]
        folder = cache_dir() / "failures" / digest
        folder.mkdir(parents=True, exist_ok=True)
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        (folder / "error.txt").write_text("".join(lines))
        (folder / "repro.py").write_text(program)
    except Exception as problem:
        return f"No reproduction could be written ({cause(problem)})"
    return f"A reproduction is in {Path(folder)}"


def _program(
    gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Mapping[str, Any], error: Exception
) -> str:
    options = {
        name: value
        for name, value in (asked.get("options") or {}).items()
        if name.removeprefix("hot.") not in OBJECTS
    }
    options["strict"] = True
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    code = readable(gm)
    return _PROGRAM.format(
        cause=cause(error).replace("\\", "/"),
        torch=torch.__version__,
        sources=sources_hash()[:12],
        python=platform.python_version(),
        machine=gpus[0] if gpus else platform.machine(),
        code=code,
        inputs="\n".join(f"    {_input(value)}," for value in example_inputs),
        asked=f"asked = {{'mode': {asked.get('mode')!r}, 'options': {options!r}}}",
        name=gm.__class__.__name__,
    )


def _input(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(hint(value)) if isinstance(value, (int, torch.SymInt)) else repr(value)
    size, stride = (tuple(map(hint, numbers)) for numbers in (value.shape, value.stride()))
    return f"tensor({size}, {stride}, {value.dtype}, {str(value.device)!r}, {value.requires_grad})"
