"""Launches of Inductor's Triton kernels, without what each of them asks anew.

Torch 2.11 and 2.12 pass a launch through three Python functions, which look at a dozen settings,
and ask CUDA for the address of each tensor although a GPU's tensor knows its own. A step of a
convolutional network makes hundreds of launches, and one that stores compressed gives each more
tensors. From 2.13 on torch has a shorter way itself, and nothing is done here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.autograd import profiler

_POINTER = "O"
"""How Inductor's launcher names an argument that is a tensor."""

_OTHERWISE = AttributeError, KeyError, TypeError, ValueError, AssertionError
"""What looking at a kernel raises that is launched in another way, or not at all."""

_SHORT = """
def make(own, launch, profiler, debugged):
    def run({names}, stream):
        if profiler._is_profiler_enabled or debugged():
            own({names}, stream=stream)
        else:
            launch({names}, stream)
    return run
"""
_RUNNER = """
def make(launch, function, warps, shared):
    def run(x, y, z, stream, {names}):
        launch(function, x, y, z, warps, shared, {types!r}, ({values},), stream)
    return run
"""


def shorten_launches(module: ModuleType) -> None:
    """Kernels that the step of a generated ``module`` launches are launched by less from their
    second launch on."""
    if hasattr(CachingAutotuner, "_build_fast_launcher") or torch.version.hip:
        return
    if not hasattr(module, "call"):  # a kernel's own source
        return
    for name, value in list(vars(module).items()):
        if type(value) is CachingAutotuner:
            setattr(module, name, _Kernel(value))


class _Kernel:
    """Stands for a kernel in the code that launches it; all else about it is the kernel's own."""

    def __init__(self, kernel: CachingAutotuner) -> None:
        self._kernel = kernel
        self.run: Callable[..., Any] = self._first

    def _first(self, *args: Any, stream: int, **kwargs: Any) -> Any:
        """As Inductor does it, which may try several configurations, and keeps one."""
        result = self._kernel.run(*args, stream=stream, **kwargs)
        by_place = None if kwargs else shortened(self._kernel, args)
        self.run = by_place or self._kernel.run
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def shortened(kernel: CachingAutotuner, args: Sequence[Any]) -> Callable[..., Any] | None:
    """``kernel.run`` for arguments like ``args``; None where it does more than launching, or what
    it launches is not what the short way would."""
    with contextlib.suppress(*_OTHERWISE):
        (launcher,) = kernel.launchers
        if _does_more(kernel, launcher):
            return None
        static = launcher.__globals__["runner"].__self__
        values = _told(lambda record: _calling(launcher, record)(*args, 0))
        runner = _runner_of(static, static.C_impl._launch_kernel)
        if _launches_alike(static, values):
            make = _made(_SHORT.format(names=", ".join(_names(len(args)))))
            debugged = triton_heuristics.get_active_debug_mode
            return make(kernel.run, _calling(launcher, runner), profiler, debugged)
    return None


def _does_more(kernel: CachingAutotuner, launcher: Any) -> bool:
    """A launch is also interpreted, written down, or searched a configuration for."""
    searches = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    return (
        kernel.triton_interpret
        or kernel.dump_launch_params
        or kernel.dump_launch_tensors
        or launcher.store_cubin
        or (searches and not getattr(launcher.config, "found_by_coordesc", False))
    )


def _launches_alike(static: Any, values: Sequence[Any]) -> bool:
    """Both ways give CUDA the same, and all tensors lie on a GPU.

    ``values``: grid, stream and arguments of a launch.
    """
    pointers = [v for v, kind in zip(values[4:], static.arg_tys, strict=True) if kind == _POINTER]
    if not all(isinstance(v, Tensor) and v.is_cuda for v in pointers):
        return False
    *whole, given, stream = _told(lambda record: _recorded(static, record).run(*values))
    addresses = tuple(v.data_ptr() if isinstance(v, Tensor) else v for v in given)
    short = _told(lambda record: _runner_of(static, record)(*values))
    return (*whole, addresses, stream) == short


def _told(call: Callable[[Callable[..., None]], Any]) -> tuple[Any, ...]:
    """What ``call`` calls the function with that it is given."""
    seen: list[tuple[Any, ...]] = []
    call(lambda *values: seen.append(values))
    (values,) = seen
    return values


def _recorded(static: Any, record: Callable[..., None]) -> Any:
    """The launcher ``static``, which calls ``record`` instead of launching."""
    twin = object.__new__(type(static))
    twin.__dict__ = {**vars(static), "C_impl": SimpleNamespace(_launch_kernel=record)}
    return twin


def _runner_of(static: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``static.run``, by ``launch``: addresses for tensors, no settings."""
    scratch = static.has_global_scratch + static.has_profile_scratch  # arguments without a use
    make = _made(_runner_text(static.arg_tys, scratch))
    return make(launch, static.function, static.num_warps, static.shared)


def _runner_text(types: str, scratch: int) -> str:
    names = _names(len(types))
    values = [
        f"{n}.data_ptr()" if kind == _POINTER else n for n, kind in zip(names, types, strict=True)
    ]
    values += ["None"] * scratch
    types += _POINTER * scratch
    return _RUNNER.format(names=", ".join(names), types=types, values=", ".join(values))


@functools.cache
def _made(text: str) -> Callable[..., Callable[..., Any]]:
    names: dict[str, Any] = {}
    exec(text, names)
    return names["make"]


def _names(count: int) -> list[str]:
    """Of arguments, none of which is one of ours: a user's kernel may have any."""
    return [f"a{i}" for i in range(count)]


def _calling(launcher: Any, runner: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, which works out the grid, with another function behind it."""
    return FunctionType(launcher.__code__, {**launcher.__globals__, "runner": runner})
