"""A model that is compiled already, run with another backend wherever it asks for "hot"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from .unchanged import Reached

Backend = Callable[..., Any]
"""Takes Dynamo's graph and its inputs, and by keyword the ``mode`` and ``options`` asked for."""
_STAND_IN: ContextVar[Backend | None] = ContextVar("hot_compile_stand_in", default=None)


def stand_in() -> Backend | None:
    """Who is to compile what backend "hot" is asked for, if not "hot" itself."""
    return _STAND_IN.get()


def laid_over(options: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a backend is ``asked`` by keyword, ``options`` over those that are in it."""
    return {**asked, "options": {**(asked.get("options") or {}), **(options or {})}}


@contextlib.contextmanager
def compiled_by(
    model: Callable[..., Any], found: Reached, backend: Backend
) -> Iterator[Callable[..., Any]]:
    """Inside, what this yields is ``model`` compiled by ``backend``.

    What its user has compiled by "hot" is compiled as it is there, piece by piece; else, or where
    torch's default did it, ``model`` is compiled as a whole. ``found``: what it works on.
    """
    modules = {part for module in found.modules for part in module.modules()}
    if any(map(_by_hot, (model, *modules, *(m._compiled_call_impl for m in modules)))):
        before = _STAND_IN.set(backend)
        try:
            yield model
        finally:
            _STAND_IN.reset(before)
    else:
        with _not_in_place(modules):
            yield torch.compile(model, backend=backend)


def _by_hot(compiled: Any) -> bool:
    """It is compiled, by another backend than torch's default, which has a configuration."""
    if compiled is None or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return isinstance(compiled, OptimizedModule) and _by_hot(compiled.forward)
    return compiled.get_compiler_config() is None


@contextlib.contextmanager
def _not_in_place(modules: set[nn.Module]) -> Iterator[None]:
    """Inside, no module is compiled in place."""
    calls = {m: m._compiled_call_impl for m in modules if m._compiled_call_impl is not None}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
