"""Triton kernels for ``rows.py``: one program a row, its columns in blocks.

Row statistics are gathered as FlashAttention does it, a running maximum and a running sum, so that
a row is read once. All arithmetic is fp32.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hot_compile.runtime.head.rows import Chunk, Gradient

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _tanh(x):
    """tanh without a library: exp of a negative number never overflows."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _statistics(
    y, y_stride, column, out, out_stride, width, inner, outer,
    CAP: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), tl.float32)
    shift = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < width
        z = tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
        if CAP:
            z = _tanh(z * inner)
        z = z * outer
        if COLUMN:
            weighted += tl.sum(tl.load(column + at, mask=inside, other=0.0) * z)
        else:
            weighted += tl.sum(tl.where(inside, z, 0.0))
        z = tl.where(inside, z, float("-inf"))
        largest = tl.maximum(largest, tl.max(z))
        # As torch.logsumexp: an infinite maximum is not subtracted, inf - inf would be NaN.
        new_shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        total = total * tl.exp(shift - new_shift) + tl.sum(tl.exp(z - new_shift))
        shift = new_shift
    tl.store(out + row, largest)
    tl.store(out + out_stride + row, shift + tl.log(total))
    tl.store(out + 3 * out_stride + row, weighted)


@triton.jit
def _gradient(
    y, y_stride, g, g_stride, lse, coefficients, c_stride, target, column, extra, extra_stride,
    extra_scale, width, inner, outer,
    CAP: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(coefficients + row)
    b = tl.load(coefficients + c_stride + row)
    c = tl.load(coefficients + 2 * c_stride + row)
    z = tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
    slope = 1.0
    if CAP:
        z = _tanh(z * inner)
        slope = 1.0 - z * z
    z = z * outer
    value = a * tl.exp(z - tl.load(lse + row))
    if TARGET:
        value += tl.where(at == tl.load(target + row), b, 0.0)
    if COLUMN:
        value += c * tl.load(column + at, mask=inside, other=0.0)
    else:
        value += c
    if EXTRA:
        more = tl.load(extra + row * extra_stride + at, mask=inside, other=0.0).to(tl.float32)
        value += extra_scale * more
    value = value * slope
    tl.store(g + row * g_stride + at, value.to(g.dtype.element_ty), mask=inside)


def statistics_(chunk: Chunk, out: Tensor) -> None:
    """Largest, log-sum-exp and weighted sum of every row into ``out`` [4, R], but its third."""
    rows, width = chunk.y.shape
    form, column = chunk.form, chunk.column
    if not rows:
        return
    _statistics[(rows,)](
        chunk.y, chunk.y.stride(0), _or(column, chunk.y), out, out.stride(0), width,
        form.inner, form.outer,
        CAP=form.cap, COLUMN=column is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def gradient_(chunk: Chunk, lse: Tensor, gradient: Gradient) -> None:
    """The gradient of a chunk, as ``rows.chunk_gradient``."""
    rows, width = chunk.y.shape
    form, extra = chunk.form, gradient.extra
    if not rows:
        return
    stride = 0 if extra is None else extra.stride(0)
    _gradient[(rows, triton.cdiv(width, _BLOCK))](
        chunk.y, chunk.y.stride(0), gradient.out, gradient.out.stride(0), lse,
        gradient.coefficients, gradient.coefficients.stride(0), _or(chunk.target, lse),
        _or(chunk.column, lse), _or(extra, lse), stride, gradient.extra_scale, width,
        form.inner, form.outer,
        CAP=form.cap, TARGET=chunk.target is not None, COLUMN=chunk.column is not None,
        EXTRA=extra is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def _or(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """A pointer that is never read stands in for what is not there."""
    return stand_in if tensor is None else tensor
