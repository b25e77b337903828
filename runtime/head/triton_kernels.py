"""Triton kernels for ``rows.py``: one program a row, its columns in blocks.

Row statistics are gathered as FlashAttention does it, a running maximum and a running sum, so that
a row is read once. That sum is kept for each column of a block and added up at the end: a block's
threads wait for each other once, for its maximum. All arithmetic is fp32; what it costs is
instructions, so whole blocks are gone through without masks. Memory is read and written as far as a
row has room: a mask that ends at an odd width would keep Triton from loading more than one element
at a time.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from hot_compile.runtime.head.rows import Chunk, Gradient

_BLOCK = 8192
_WARPS = 16
ALIGNED = 16
"""Bytes; a kernel rests on whether a tensor begins at a multiple of that many."""
_LOG2E = tl.constexpr(1.4426950408889634)
"""Powers of 2 are one instruction, and the factor is added to what is multiplied anyway."""


@triton.jit
def _tanh(x):
    """tanh without a library: exp of a negative number never overflows."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _largest_and_sum(a, b, c, d):
    return tl.maximum(a, c), b + d


@triton.jit
def _seen(
    y, at, logits, column, width, room, inner, outer, largest, shift, total, weighted,
    CAP: tl.constexpr, SCALED: tl.constexpr, COLUMN: tl.constexpr, LOGITS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """What is known of a row, with one block more; ``WHOLE``: all of it are columns of the row."""
    inside = at < width
    z = tl.load(y + at) if WHOLE else tl.load(y + at, mask=at < room, other=0.0)
    z = z.to(tl.float32)
    if CAP:
        z = _tanh(z * inner)
    if SCALED:
        z *= outer
    if LOGITS:  # rows of an odd width lie unaligned: neighbouring threads, single elements
        tl.store(logits + at, z.to(logits.dtype.element_ty), mask=inside)
    summed = z if WHOLE else tl.where(inside, z, 0.0)
    if COLUMN:
        summed *= tl.load(column + at, mask=inside, other=0.0)
    if not WHOLE:
        z = tl.where(inside, z, float("-inf"))
    of_block, summed = tl.reduce((z, summed), 0, _largest_and_sum)
    largest = tl.maximum(largest, of_block)
    # As torch.logsumexp: an infinite maximum is not subtracted, inf - inf would be NaN.
    new_shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest * _LOG2E)
    total = total * tl.exp2(shift - new_shift) + tl.exp2(z * _LOG2E - new_shift)
    return largest, new_shift, total, weighted + summed


@triton.jit
def _gradient_block(
    y, g, at, a, b, c, lse, label, column, extra, extra_scale, width, room, inner, outer,
    CAP: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr, EXTRA: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """``lse`` is one of base 2."""
    inside = at < width
    z = tl.load(y + at) if WHOLE else tl.load(y + at, mask=at < room, other=0.0)
    z = z.to(tl.float32)
    slope = 1.0
    if CAP:
        z = _tanh(z * inner)
        slope = 1.0 - z * z
    value = a * tl.exp2(z * (outer * _LOG2E) - lse)
    if TARGET:
        value += tl.where(at == label, b, 0.0)
    if COLUMN:
        value += c * tl.load(column + at, mask=inside, other=0.0)
    else:
        value += c
    if EXTRA:
        more = tl.load(extra + at, mask=inside, other=0.0).to(tl.float32)
        value += extra_scale * more
    if CAP:
        value *= slope
    if WHOLE:
        tl.store(g + at, value.to(g.dtype.element_ty))
    else:
        tl.store(g + at, tl.where(inside, value, 0.0).to(g.dtype.element_ty), mask=at < room)


@triton.jit
def _statistics(
    y, y_stride, target, column, out, out_stride, logits, logits_stride,
    g, g_stride, coefficients, c_stride, width, room, inner, outer,
    CAP: tl.constexpr, SCALED: tl.constexpr, TARGET: tl.constexpr, COLUMN: tl.constexpr,
    LOGITS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y += row * y_stride
    logits += row * logits_stride
    largest = tl.full((), float("-inf"), tl.float32)
    shift = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        largest, shift, total, weighted = _seen(
            y, first + tl.arange(0, BLOCK), logits, column, width, room, inner, outer,
            largest, shift, total, weighted, CAP, SCALED, COLUMN, LOGITS, True,
        )  # fmt: skip
    if whole < width:
        largest, shift, total, weighted = _seen(
            y, whole + tl.arange(0, BLOCK), logits, column, width, room, inner, outer,
            largest, shift, total, weighted, CAP, SCALED, COLUMN, LOGITS, False,
        )  # fmt: skip
    lse = tl.where(tl.abs(largest) == float("inf"), 0.0, largest) + tl.log(tl.sum(total))
    tl.store(out + row, largest)
    tl.store(out + out_stride + row, lse)
    tl.store(out + 3 * out_stride + row, weighted)
    picked = 0.0
    slope = 1.0
    place = 0
    known = False
    if TARGET:
        place = tl.load(target + row)
        known = (place >= 0) & (place < width)
        picked = tl.load(y + place, mask=known, other=0.0).to(tl.float32)
        if CAP:
            picked = _tanh(picked * inner)
            slope = 1.0 - picked * picked
        picked = picked * outer
    tl.store(out + 2 * out_stride + row, picked)
    if GRADIENT:
        tl.debug_barrier()  # the gradient may take y's place: every thread has read its label's y
        g += row * g_stride
        a = tl.load(coefficients + row)
        b = tl.load(coefficients + c_stride + row)
        c = tl.load(coefficients + 2 * c_stride + row)
        lse *= _LOG2E
        for first in range(whole, room, BLOCK):
            _gradient_block(
                y, g, first + tl.arange(0, BLOCK), a, b, c, lse, place, column, out, 1.0,
                width, room, inner, outer, CAP, False, COLUMN, False, False,
            )  # fmt: skip
        for behind in range(0, whole, BLOCK):  # from the end on, which the cache still holds
            _gradient_block(
                y, g, whole - BLOCK - behind + tl.arange(0, BLOCK), a, b, c, lse, place, column,
                out, 1.0, width, room, inner, outer, CAP, False, COLUMN, False, True,
            )  # fmt: skip
        if TARGET:  # its label's by itself, which is cheaper than asking everywhere
            if COLUMN:
                c *= tl.load(column + place, mask=known, other=0.0)
            value = (a * tl.exp2(picked * _LOG2E - lse) + b + c) * slope
            tl.debug_barrier()
            tl.store(g + place, value.to(g.dtype.element_ty), mask=known)


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
        label = tl.where((label >= 0) & (label < width), label, -1).to(tl.int32)
    _gradient_block(
        y + row * y_stride, g + row * g_stride, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
        a, b, c, tl.load(lse + row) * _LOG2E, label, column, extra + row * extra_stride,
        extra_scale, width, room, inner, outer, CAP, TARGET, COLUMN, EXTRA, False,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel and what it is given for some rows of logits, one program or several a row."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    """All of the kernel's, in its order."""
    steps: tuple[int, ...]
    """For each of ``args``: bytes from a row's part of a tensor to the next row's, or 0, which is
    left out at the end."""

    def launch(self, launches: Repeated | None) -> None:
        """``launches``: of the chunks before this one's; None: there are none."""
        if self.grid[0]:
            (launches or Repeated()).launch(self.kernel, self.grid, *self.args)

    def compiled(self) -> Any:
        """What Triton makes of the kernel for such arguments, loaded, but not launched; None where
        it interprets kernels."""
        if not isinstance(self.kernel, triton.JITFunction):
            return None
        made = self.kernel.warmup(*self.args, grid=self.grid, num_warps=_WARPS)
        made._init_handles()
        return made


class Repeated:
    """Launches of the same kernels for one chunk after another.

    At each launch Triton looks at all arguments for what a kernel may rest on, and that takes its
    host as long as three products. Chunks differ in where they lie and in nothing of that kind.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[Any], Any]] = {}

    def launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any) -> None:
        """``kernel``, compiled as for the launch before where arguments are of the same kind."""
        kind = [kind_of(arg) for arg in args]
        known, compiled = self._known.get(kernel, (None, None))
        if compiled and kind == known:
            compiled[grid](*args)
        else:
            self._known[kernel] = kind, kernel[grid](*args, num_warps=_WARPS)


def kind_of(arg: Any) -> Any:
    """All of an argument that a kernel may rest on."""
    own = type(arg)
    if own is int:
        return arg == 1, arg % ALIGNED == 0, arg.bit_length() > 31
    return arg if own is bool or own is float else (arg.dtype, arg.data_ptr() % ALIGNED)


def statistics_call(
    chunk: Chunk, out: Tensor, logits: Tensor | None = None, gradient: Gradient | None = None
) -> Call:
    """The four statistics of every row into ``out`` [4, R], the logits into ``logits``, and in the
    same launch the gradient, to which nothing from outside is added."""
    rows, room = chunk.y.shape
    form, column = chunk.form, chunk.column
    g, coefficients = (out, out) if gradient is None else (gradient.out, gradient.coefficients)
    args = (
        chunk.y, chunk.y.stride(0), _or(chunk.target, out), _or(column, out), out, out.stride(0),
        _or(logits, out), 0 if logits is None else logits.stride(0),
        g, g.stride(0), coefficients, coefficients.stride(0),
        chunk.width, room, form.inner, form.outer,
        form.cap, form.outer != 1, chunk.target is not None,
        column is not None, logits is not None, gradient is not None, _BLOCK,
    )  # fmt: skip
    steps = (
        _step(chunk.y), 0, _step(chunk.target), 0, out.itemsize, 0, _step(logits), 0,
        0 if gradient is None else _step(g), 0, coefficients.itemsize,
    )  # fmt: skip
    return Call(_statistics, (rows, 1, 1), args, steps)


def gradient_call(chunk: Chunk, lse: Tensor, gradient: Gradient) -> Call:
    """The gradient of a chunk of which ``lse`` [R] is known."""
    rows, room = chunk.y.shape
    form, extra, coefficients = chunk.form, gradient.extra, gradient.coefficients
    args = (
        chunk.y, chunk.y.stride(0), gradient.out, gradient.out.stride(0), lse,
        coefficients, coefficients.stride(0), _or(chunk.target, lse),
        _or(chunk.column, lse), _or(extra, lse), 0 if extra is None else extra.stride(0),
        gradient.extra_scale, chunk.width, room, form.inner, form.outer,
        form.cap, chunk.target is not None, chunk.column is not None, extra is not None, _BLOCK,
    )  # fmt: skip
    steps = (
        _step(chunk.y), 0, _step(gradient.out), 0, lse.itemsize, coefficients.itemsize, 0,
        _step(chunk.target), 0, _step(extra),
    )  # fmt: skip
    return Call(_gradient, (rows, triton.cdiv(room, _BLOCK), 1), args, steps)


def _step(tensor: Tensor | None) -> int:
    """Bytes from a row of it to the next."""
    return 0 if tensor is None else tensor.stride(0) * tensor.itemsize


def _or(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """A pointer that is never read stands in for what is not there."""
    return stand_in if tensor is None else tensor
