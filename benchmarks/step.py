"""How benchmarks compile a model: stock Inductor, torchao's float8, or HOT, by a short text.

``exact+recompute`` is the honest stock baseline for memory: Inductor told that it may recompute
pointwise results (functorch's ``ban_recompute_materialized_backward=False``). ``float8-tensorwise``
and ``float8-rowwise`` are torchao's (``pip install torchao``; GPUs of compute capability 8.9 on).
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from torch import nn

RECOMPUTE = "+recompute"
FLOAT8 = "float8-"
HEADS = ("head", "fc", "classifier", "lm_head")
_MULTIPLE = 16


def compile_for(config: str, model: nn.Module) -> Callable[..., Any]:
    """``model``, compiled as :func:`compiling` says."""
    return torch.compile(model, **compiling(config, model))


def compiling(config: str, model: nn.Module) -> dict[str, Any]:
    """What ``torch.compile`` is told for ``exact``, ``float8-<torchao's recipe>`` (changes
    ``model``), or a recipe of ``hot`` with options (``hot:memory=off:gx_bits=8``).

    Each may have ``+recompute`` behind it.
    """
    name, *settings = config.removesuffix(RECOMPUTE).split(":")
    if name.startswith(FLOAT8):
        _to_float8(model, name.removeprefix(FLOAT8))
        name = "exact"
    backend: Any = "inductor" if name == "exact" else "hot"
    ours = {"recipe": name, "strict": True} | dict(map(_setting, settings))
    options = None if name == "exact" else ours
    if config.endswith(RECOMPUTE):
        backend = _recomputing(backend)
    return {"backend": backend, "options": options}


def _to_float8(model: nn.Module, recipe: str) -> None:
    """Every Linear but the head becomes torchao's, as its documentation recommends."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=settings, module_filter_fn=takes_float8)


def takes_float8(module: nn.Module, path: str) -> bool:
    """Whether torchao's documentation would have the layer converted: every one but the head whose
    sizes hardware can take. Of a convolution these are its channels.
    """
    sizes = (
        *(getattr(module, name, 0) for name in ("in_features", "out_features")),
        *(getattr(module, name, 0) for name in ("in_channels", "out_channels")),
    )
    return path not in HEADS and any(sizes) and not any(size % _MULTIPLE for size in sizes)


def _setting(text: str) -> tuple[str, Any]:
    """``key=value``; the value as Python reads it, or the text itself."""
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _recomputing(name: str) -> Callable[..., Any]:
    """A backend of its own, since Dynamo shares code between equal backends."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return torch._dynamo.lookup_backend(name)(gm, inputs, **kwargs)

    return backend


def synchronize(device: torch.device) -> None:
    """Wait for what was sent to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def compiler_settings(dtype: str):
    """Room for all configurations at once, and the products' precision."""
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
