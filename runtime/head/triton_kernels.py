"""Triton kernels for ``rows.py``: one program a row, its columns in blocks.

Row statistics are gathered as FlashAttention does it, a running maximum and a running sum, so that
a row is read once. All arithmetic is fp32. Memory is read and written as far as a row has room: a
mask that ends at an odd width would keep Triton from loading more than one element at a time.
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
def _gradient_block(
    y, g, at, a, b, c, lse, label, column, extra, extra_scale, width, room, inner, outer,
    CAP: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    inside = at < width
    within = at < room
    z = tl.load(y + at, mask=within, other=0.0).to(tl.float32)
    slope = 1.0
    if CAP:
        z = _tanh(z * inner)
        slope = 1.0 - z * z
    z = z * outer
    value = a * tl.exp(z - lse)
    if TARGET:
        value += tl.where(at == label, b, 0.0)
    if COLUMN:
        value += c * tl.load(column + at, mask=inside, other=0.0)
    else:
        value += c
    if EXTRA:
        more = tl.load(extra + at, mask=inside, other=0.0).to(tl.float32)
        value += extra_scale * more
    value = tl.where(inside, value * slope, 0.0)
    tl.store(g + at, value.to(g.dtype.element_ty), mask=within)


@triton.jit
def _statistics(
    y, y_stride, target, column, out, out_stride, logits, logits_stride,
    g, g_stride, coefficients, c_stride, width, room, inner, outer,
    CAP: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr, LOGITS: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y += row * y_stride
    largest = tl.full((), float("-inf"), tl.float32)
    shift = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < width
        z = tl.load(y + at, mask=at < room, other=0.0).to(tl.float32)
        if CAP:
            z = _tanh(z * inner)
        z = z * outer
        if LOGITS:  # rows of an odd width lie unaligned: neighbouring threads, single elements
            there = logits + row * logits_stride + at
            tl.store(there, z.to(logits.dtype.element_ty), mask=inside)
        if COLUMN:
            z = tl.where(inside, z, 0.0)
            weighted += tl.sum(tl.load(column + at, mask=inside, other=0.0) * z)
        else:
            weighted += tl.sum(tl.where(inside, z, 0.0))
        z = tl.where(inside, z, float("-inf"))
        largest = tl.maximum(largest, tl.max(z))
        # As torch.logsumexp: an infinite maximum is not subtracted, inf - inf would be NaN.
        new_shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        total = total * tl.exp(shift - new_shift) + tl.sum(tl.exp(z - new_shift))
        shift = new_shift
    lse = shift + tl.log(total)
    tl.store(out + row, largest)
    tl.store(out + out_stride + row, lse)
    tl.store(out + 3 * out_stride + row, weighted)
    picked = 0.0
    place = 0
    if TARGET:
        place = tl.load(target + row)
        known = (place >= 0) & (place < width)
        picked = tl.load(y + place, mask=known, other=0.0).to(tl.float32)
        if CAP:
            picked = _tanh(picked * inner)
        picked = picked * outer
    tl.store(out + 2 * out_stride + row, picked)
    if GRADIENT:  # a row's second reading finds most of it in the cache
        tl.debug_barrier()  # the gradient may take y's place: every thread has read its label's y
        a = tl.load(coefficients + row)
        b = tl.load(coefficients + c_stride + row)
        c = tl.load(coefficients + 2 * c_stride + row)
        for first in range(0, room, BLOCK):
            _gradient_block(
                y, g + row * g_stride, first + tl.arange(0, BLOCK), a, b, c, lse, place, column,
                out, 1.0, width, room, inner, outer, CAP, TARGET, COLUMN, False,
            )  # fmt: skip


@triton.jit
def _gradient(
    y, y_stride, g, g_stride, lse, coefficients, c_stride, target, column, extra, extra_stride,
    extra_scale, width, room, inner, outer,
    CAP: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    a = tl.load(coefficients + row)
    b = tl.load(coefficients + c_stride + row)
    c = tl.load(coefficients + 2 * c_stride + row)
    label = 0
    if TARGET:
        label = tl.load(target + row)
    _gradient_block(
        y + row * y_stride, g + row * g_stride, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
        a, b, c, tl.load(lse + row), label, column, extra + row * extra_stride, extra_scale,
        width, room, inner, outer, CAP, TARGET, COLUMN, EXTRA,
    )  # fmt: skip


def statistics_(
    chunk: Chunk, out: Tensor, logits: Tensor | None = None, gradient: Gradient | None = None
) -> None:
    """The four statistics of every row into ``out`` [4, R], the logits into ``logits``, and in the
    same launch the gradient, to which nothing from outside is added."""
    rows, room = chunk.y.shape
    form, column = chunk.form, chunk.column
    if not rows:
        return
    g, coefficients = (out, out) if gradient is None else (gradient.out, gradient.coefficients)
    _statistics[(rows,)](
        chunk.y, chunk.y.stride(0), _or(chunk.target, out), _or(column, out), out, out.stride(0),
        _or(logits, out), 0 if logits is None else logits.stride(0),
        g, g.stride(0), coefficients, coefficients.stride(0),
        chunk.width, room, form.inner, form.outer,
        CAP=form.cap, TARGET=chunk.target is not None, COLUMN=column is not None,
        LOGITS=logits is not None, GRADIENT=gradient is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def gradient_(chunk: Chunk, lse: Tensor, gradient: Gradient) -> None:
    """The gradient of a chunk, as ``rows.chunk_gradient``."""
    rows, room = chunk.y.shape
    form, extra = chunk.form, gradient.extra
    if not rows:
        return
    stride = 0 if extra is None else extra.stride(0)
    _gradient[(rows, triton.cdiv(room, _BLOCK))](
        chunk.y, chunk.y.stride(0), gradient.out, gradient.out.stride(0), lse,
        gradient.coefficients, gradient.coefficients.stride(0), _or(chunk.target, lse),
        _or(chunk.column, lse), _or(extra, lse), stride, gradient.extra_scale,
        chunk.width, room, form.inner, form.outer,
        CAP=form.cap, TARGET=chunk.target is not None, COLUMN=chunk.column is not None,
        EXTRA=extra is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def _or(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """A pointer that is never read stands in for what is not there."""
    return stand_in if tensor is None else tensor
