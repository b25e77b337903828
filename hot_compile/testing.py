"""Measures that tests and benchmarks share: how close gradients are, and what a model's are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .backend import hot
from .record import GraphReport, Reports, run_uncompiled


def cosine(got: Tensor, want: Tensor) -> float:
    """Cosine of the angle between two tensors as vectors, in fp64; 1.0 of zeros, 0.0 of one."""
    a, b = got.double().flatten(), want.double().flatten()
    norms = a.norm() * b.norm()
    return float(torch.equal(a, b)) if norms == 0 else float(a @ b / norms)


def sqnr(got: Tensor, want: Tensor) -> float:
    """Signal to quantisation noise ratio of ``got`` against ``want``, in dB."""
    noise = float((got.double() - want.double()).norm())
    return math.inf if noise == 0 else 20 * math.log10(float(want.double().norm()) / noise)


def step(
    function: Callable[..., Tensor], *inputs: Any, backend: Any, **compile_options: Any
) -> Tensor:
    """One forward and backward of the scalar ``function`` under a backend, compiled afresh."""
    torch._dynamo.reset()
    loss = torch.compile(function, backend=backend, **compile_options)(*inputs)
    loss.backward()
    return loss.detach()


def hot_step(
    function: Callable[..., Tensor],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    lower: bool = False,
    **compile_options: Any,
) -> tuple[Tensor, list[GraphReport]]:
    """(loss, reports) of one step under ``backend="hot"``.

    Args:
        lower: True generates code as a user's run does; False runs the finished graphs node by
            node, which takes seconds less and exercises the same operators.
    """
    reports = Reports()
    keywords: dict[str, Any] = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=options, recorder=reports, **keywords)
    return step(function, *inputs, backend=backend, **compile_options), reports.graphs
