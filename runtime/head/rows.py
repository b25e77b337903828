"""Passes over a chunk of logits: statistics of its rows, and its gradient. Plain ATen, in blocks.

A block of rows is small enough to stay in a CPU's cache over the half dozen passes that eager
operators make of it. On CUDA the Triton kernels of ``triton_kernels.py`` make one pass of each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hot_compile.runtime.head.triton_kernels import Call, Repeated

_BLOCK = 2**19
"""Elements of a block: 2 MiB in fp32."""
_FILLING = 512
"""Rows that fill a GPU, one program each."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How logits come from the product: z = outer * tanh(inner * y), or outer * y."""

    inner: float
    cap: bool
    outer: float

    def __call__(self, y: Tensor) -> Tensor:
        """z in fp32, in fresh memory."""
        z = y.to(torch.float32, copy=True)
        if self.cap:
            z = z.mul_(self.inner).tanh_()
        return z if self.outer == 1 else z.mul_(self.outer)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What the gradient of a chunk's logits is made of, and where it goes."""

    out: Tensor
    """[R, P] in the dtype the products read; may be the chunk of logits itself. What is behind its
    first O' columns becomes zero."""
    coefficients: Tensor
    """[3, R]."""
    extra: Tensor | None = None
    extra_scale: float = 1.0

    def of_rows(self, own: slice, out: Tensor) -> Gradient:
        """Of some of the rows, at a place of theirs."""
        extra = None if self.extra is None else self.extra[own]
        return Gradient(out, self.coefficients[:, own], extra, self.extra_scale)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some rows and columns of the product y, and what belongs to them."""

    y: Tensor
    """[R, P]: O' columns, and perhaps some that mean nothing but make products fast."""
    width: int
    """O'."""
    target: Tensor | None
    """[R]."""
    column: Tensor | None
    """[O']."""
    form: Form
    launches: Repeated | None = None
    """What launched the kernels of the chunks before it; None: it is the only one."""

    def of_rows(self, own: slice, y: Tensor) -> Chunk:
        """Some of the rows, whose product is ``y``."""
        target = None if self.target is None else self.target[own]
        return dataclasses.replace(self, y=y, target=target)


def repeated(x: Tensor) -> Repeated | None:
    """What launches the kernels of all chunks of an operator's call, where Triton makes them."""
    if not has_triton(x):
        return None
    from hot_compile.runtime.head.triton_kernels import Repeated

    return Repeated()


def calls_of(
    chunk: Chunk, out: Tensor, logits: Tensor | None, gradient: Gradient | None, rows: int
) -> list[Call]:
    """``chunk_pass`` as launches of Triton's kernels: one where a launch's ``rows`` fill a GPU and
    nothing is added to their gradient."""
    from hot_compile.runtime.head.triton_kernels import gradient_call, statistics_call

    if gradient is None:
        return [statistics_call(chunk, out, logits)]
    if gradient.extra is None and rows >= _FILLING:
        return [statistics_call(chunk, out, logits, gradient)]
    return [statistics_call(chunk, out, logits), gradient_call(chunk, out[1], gradient)]


def chunk_pass(
    chunk: Chunk, out: Tensor, logits: Tensor | None = None, gradient: Gradient | None = None
) -> None:
    """Write the four statistics of every row of a chunk that is as wide as the logits.

    ``out`` [4, R]; the logits themselves to ``logits`` [R, O'], of any dtype, and y's gradient if
    that is asked for, in the same pass. On a CPU, raises what ``gather`` raises where a target is
    out of range.
    """
    if has_triton(out):
        for call in calls_of(chunk, out, logits, gradient, len(chunk.y)):
            call.launch(chunk.launches)
        return
    if gradient is not None:
        gradient.out[:, chunk.width :].zero_()
    for rows in blocks(chunk.y):
        z = chunk.form(chunk.y[rows, : chunk.width])
        if logits is not None:
            logits[rows] = z
        _plain_pass(chunk, rows, z, out[:, rows], gradient)


def _plain_pass(
    chunk: Chunk, rows: slice, z: Tensor, out: Tensor, gradient: Gradient | None
) -> None:
    """Of some rows' logits ``z``, which are overwritten."""
    out[0] = z.amax(1)
    out[2] = 0.0 if chunk.target is None else z.gather(1, chunk.target[rows, None])[:, 0]
    out[3] = z.sum(1) if chunk.column is None else z @ chunk.column
    slope = (z / chunk.form.outer).square_().neg_().add_(1) if chunk.form.cap else None
    shift = out[0].where(out[0].isfinite(), 0.0)  # inf - inf would be NaN
    g = z.sub_(shift[:, None]).exp_()
    total = g.sum(1)
    out[1] = total.log() + shift
    if gradient is None:
        return
    a, b, c = gradient.coefficients[:, rows, None]
    g.mul_(a / total[:, None])
    if chunk.target is not None:
        g.scatter_add_(1, chunk.target[rows, None], b)
    g.add_(c if chunk.column is None else c * chunk.column)
    if gradient.extra is not None:
        g.add_(gradient.extra[rows], alpha=gradient.extra_scale)
    gradient.out[rows, : chunk.width] = g if slope is None else g.mul_(slope)


def blocks(y: Tensor) -> Iterator[slice]:
    """Rows of ``y`` [R, P] by blocks that stay in a CPU's cache; all at once on CUDA."""
    rows = y.shape[0] if has_triton(y) else max(1, _BLOCK // max(1, y.shape[1]))
    return (slice(first, first + rows) for first in range(0, y.shape[0], max(1, rows)))


def has_triton(tensor: Tensor) -> bool:
    """It lies where Triton makes kernels."""
    return tensor.is_cuda and _triton_found()


@functools.cache
def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None
