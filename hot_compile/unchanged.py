"""A training step that is only tried out: what it works on, and all of it put back afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_DEPTH = 8
_WIDEST = 1024
"""Longer containers (data sets, vocabularies) are not looked into."""


@dataclasses.dataclass(frozen=True)
class Reached:
    """Modules and tensors that a function can get at; each once."""

    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]
    """Those that belong to no module."""

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of the modules, and other leaves that gather gradients."""
        own = [p for module in self.modules for p in module.parameters()]
        leaves = [t for t in self.tensors if t.is_leaf and t.requires_grad]
        return _distinct([*own, *leaves])

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of the modules."""
        return _distinct(b for module in self.modules for b in module.buffers())

    @property
    def devices(self) -> list[torch.device]:
        """Where its tensors are, parameters first."""
        tensors = (*self.parameters, *self.buffers, *self.tensors)
        return list(dict.fromkeys(t.device for t in tensors))


def reached(*roots: Any) -> Reached:
    """What is found from functions and their arguments.

    Followed are closures, default arguments, globals that a function names, the object of a bound
    method, ``functools.partial``, containers of at most 1024 items and attributes of other objects,
    eight deep in all.
    """
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    level: list[Any] = list(roots)
    for _ in range(_DEPTH):
        fresh = {id(item): item for item in level if id(item) not in seen}
        seen.update(fresh)
        level = []
        for item in fresh.values():
            if isinstance(item, nn.Module):
                modules.append(item)
            elif isinstance(item, Tensor):
                tensors.append(item)
            else:
                level.extend(_leading_on(item))
    owned = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}
    return Reached(tuple(modules), tuple(t for t in tensors if id(t) not in owned))


def _leading_on(item: Any) -> Iterable[Any]:
    """What can be got from a function, a container or another object."""
    if isinstance(item, types.FunctionType):
        return [*_cells(item), *(item.__defaults__ or ()), *_globals(item)]
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, *item.args, *item.keywords.values()
    if isinstance(item, (str, bytes, type, types.ModuleType)):
        return ()
    if isinstance(item, (Mapping, Sequence, Set)):
        values = item.values() if isinstance(item, Mapping) else item
        return values if len(item) <= _WIDEST else ()
    return getattr(item, "__dict__", {}).values()


def _cells(function: types.FunctionType) -> Iterator[Any]:
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """Globals that its code, or that of a function within it, names."""
    codes: list[Any] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        named = (function.__globals__.get(name) for name in code.co_names)
        yield from (value for value in named if value is not None)


@contextlib.contextmanager
def unchanged(found: Reached) -> Iterator[Callable[[Iterable[Any]], None]]:
    """Put gradients, buffers and random states back, and forget the compilations made inside.

    Inside, ``.grad`` is None to begin with. Parameters are put back where an optimizer steps, with
    the optimizer's state; they are copied only then. Yields a function that takes tensors found
    later: leaves among them get their gradients back as well.
    """
    gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def set_aside(tensors: Iterable[Any]) -> None:
        for t in tensors:
            if isinstance(t, Tensor) and t.is_leaf and t.requires_grad and id(t) not in gradients:
                gradients[id(t)] = t, t.grad
                t.grad = None

    buffers = [(b, b.detach().clone()) for b in found.buffers]
    torch._dynamo.reset()
    with _random_states(found.devices), _optimizers_put_back():
        set_aside(found.parameters)
        try:
            yield set_aside
        finally:
            torch._dynamo.reset()
            for tensor, gradient in gradients.values():
                tensor.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextlib.contextmanager
def _random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def _optimizers_put_back() -> Iterator[None]:
    """Undo the steps of all optimizers: their parameters' values and their states."""
    stepped: dict[int, tuple[Optimizer, dict[Any, Any], list[tuple[Tensor, Tensor]]]] = {}

    @torch._dynamo.disable
    def before_step(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in stepped:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            values = [(p, p.detach().clone()) for p in parameters]
            stepped[id(optimizer)] = optimizer, dict(optimizer.state), values
            optimizer.state.update(_copied(dict(optimizer.state)))  # the originals are kept

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, state, values in stepped.values():
            optimizer.state.clear()
            optimizer.state.update(state)
            with torch.no_grad():
                for parameter, before in values:
                    parameter.copy_(before)


def _copied(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return {key: _copied(value) for key, value in nest.items()}
    return [_copied(value) for value in nest] if isinstance(nest, list) else nest


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())
