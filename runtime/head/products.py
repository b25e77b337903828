"""Operators of a head that go through it in chunks: no logits, no gradient of theirs, as a whole.

Defined by ``reference/head.py``. Each is functional, returns fresh contiguous tensors and reads
nothing back to the host. Products are the library's. Importing this registers them:

* ``hot::head_statistics``: of every row of the logits, and the logits if the caller gets them;
* ``hot::head_gradients``: g_x, g_w, g_b, with the logits multiplied out again, by columns;
* ``hot::head_both``: both in one go, by rows, where the coefficients are known before the loss.

Their gradients' products are exact. ``both`` and ``gradients_by_rows`` take others' instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hot_compile.runtime.head.rows import (
    Chunk,
    Form,
    Gradient,
    chunk_gradient,
    chunk_statistics,
)

STATISTICS = 4
CHUNK_BYTES = 2**29
"""Most bytes of a chunk of logits."""
_LEAST_BYTES = 2**23
_ALIGN = 16
"""Columns of a chunk are made a multiple of this on a GPU, whose products of an odd width take two
to six times as long."""

_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor? target, Tensor? column"
_FORM = "float inner, bool cap, float outer"
SCHEMAS = {
    "head_statistics": (
        f"({_HEAD}, {_FORM}, ScalarType? logits_dtype) -> (Tensor statistics, Tensor logits)"
    ),
    "head_gradients": (
        f"({_HEAD}, Tensor lse, Tensor coefficients, Tensor? extra, float extra_scale, {_FORM},"
        " bool[3] wanted) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"
    ),
    "head_both": (
        f"({_HEAD}, Tensor coefficients, {_FORM}, ScalarType? logits_dtype, bool[3] wanted)"
        " -> (Tensor statistics, Tensor logits, Tensor grad_x, Tensor grad_weight,"
        " Tensor grad_bias)"
    ),
}

Multiply = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]
"""(y's gradient [R, O], x [R, I], W [O, I]) -> (g_x, g_w) of these rows; None: the exact one."""

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


def chunk_rows(rows: int, outputs: int, inputs: int, itemsize: int, grad_weight: bool) -> int:
    """Rows of a chunk, so that chunks are even.

    Each chunk adds to g_w, in fp32, which is read and written anew: so a chunk may take as much
    memory as g_w does, which is there anyway. Without g_w small chunks cost nothing.
    """
    row = outputs * itemsize
    most = outputs * inputs * 4 if grad_weight else 8 * _LEAST_BYTES
    most = min(max(most, _LEAST_BYTES), CHUNK_BYTES)
    count = max(1, -(-rows * row // most))
    even = max(1, -(-rows // count))
    return even if even < 512 else -(-even // 128) * 128  # whole tiles of a product


def chunk_columns(rows: int, outputs: int, itemsize: int) -> int:
    """Columns of a chunk: many enough for a product at full speed, in multiples of 128."""
    fitting = 8 * _LEAST_BYTES // max(1, rows * itemsize)
    return min(outputs, max(1024, fitting // 128 * 128))


def _exact(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A step under autocast must not cast operands that the graph has cast already."""
    return torch.autocast(device.type, enabled=False)


def _head_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    none = [False, False, False]
    made = both(
        x, weight, bias, target, column, None, inner, cap, outer, logits_dtype, none
    )  # fmt: skip
    return made[0], made[1]


def both(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    coefficients: Tensor | None,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
    wanted: list[bool],
    multiply: Multiply | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``hot::head_both``; its gradients' products by ``multiply``. Without coefficients: none."""
    form, target = Form(inner, cap, outer), _valid(target, weight)
    coefficients = None if coefficients is None else coefficients.contiguous()
    statistics = x.new_empty((STATISTICS, x.shape[0]), dtype=torch.float32)
    logits = _logits(x, weight, logits_dtype)
    outputs, (weight, bias) = weight.shape[0], _padded(weight, bias)
    gradients = gradients_of(x, weight, wanted, torch.float32)
    with _exact(x.device):
        for rows, g in _row_chunks(x, weight, wanted[1]):
            y, theirs = _logits_of(x, weight, bias, rows, g, logits, form)
            chunk = Chunk(y, outputs, None if target is None else target[rows], column, form)
            chunk_statistics(chunk, statistics[:, rows], theirs)
            if coefficients is not None:
                chunk_gradient(chunk, statistics[1, rows], Gradient(g, coefficients[:, rows]))
                _add_gradients(g, x, weight, rows, gradients, multiply)
    return statistics, logits, *_without_padding(gradients, outputs)


def gradients_by_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    lse: Tensor,
    coefficients: Tensor,
    extra: Tensor | None,
    extra_scale: float,
    inner: float,
    cap: bool,
    outer: float,
    wanted: list[bool],
    multiply: Multiply | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``hot::head_gradients`` in chunks of rows, g_w in fp32; its products by ``multiply``."""
    form, coefficients = Form(inner, cap, outer), coefficients.contiguous()
    target = _dense(target)
    outputs, (weight, bias) = weight.shape[0], _padded(weight, bias)
    gradients = gradients_of(x, weight, wanted, torch.float32)
    with _exact(x.device):
        for rows, y in _row_chunks(x, weight, wanted[1]):
            _product(x[rows], weight, bias, y)
            outside = None if extra is None else extra[rows]
            chunk = Chunk(y, outputs, None if target is None else target[rows], column, form)
            gradient = Gradient(y, coefficients[:, rows], outside, extra_scale)
            chunk_gradient(chunk, lse[rows], gradient)
            _add_gradients(y, x, weight, rows, gradients, multiply)
    return _without_padding(gradients, outputs)


def _add_gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    rows: slice,
    gradients: tuple[Tensor, Tensor, Tensor],
    multiply: Multiply | None,
) -> None:
    """What rows whose gradient of y is ``g`` give to (g_x, g_w, g_b), empty if not wanted."""
    grad_x, grad_weight, grad_bias = gradients
    own_x, own_weight = multiply(g, x[rows], weight) if multiply else (None, None)
    if own_x is not None:
        grad_x[rows] = own_x
    elif grad_x.numel():
        torch.mm(g, weight, out=grad_x[rows])
    if own_weight is not None:
        grad_weight += own_weight
    elif grad_weight.numel():
        _add_product(grad_weight, g.t(), x[rows])
    if grad_bias.numel():
        grad_bias += g.sum(0, dtype=torch.float32)


def _head_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    lse: Tensor,
    coefficients: Tensor,
    extra: Tensor | None,
    extra_scale: float,
    inner: float,
    cap: bool,
    outer: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    form, coefficients = Form(inner, cap, outer), coefficients.contiguous()
    (rows, _), outputs = x.shape, weight.shape[0]
    weight, bias = _padded(weight, bias)
    grad_x, grad_weight, grad_bias = gradients_of(x, weight, wanted, x.dtype)
    sum_x = torch.zeros_like(grad_x, dtype=torch.float32)
    width = chunk_columns(rows, outputs, x.element_size())
    scratch = x.new_empty((rows, -(-width // _ALIGN) * _ALIGN))
    target = _dense(target)
    with _exact(x.device):
        for first in range(0, outputs, width):
            last = min(first + width, outputs)
            columns = slice(first, weight.shape[0] if last == outputs else last)
            part = weight[columns]
            y = scratch[:, : part.shape[0]]
            _product(x, part, None if bias is None else bias[columns], y)
            own = None if column is None else column[first:last]
            place = None if target is None else target - first
            outside = None if extra is None else extra[:, first:last]
            gradient = Gradient(y, coefficients, outside, extra_scale)
            chunk_gradient(Chunk(y, last - first, place, own, form), lse, gradient)
            if wanted[0]:
                _add_product(sum_x, y, part)
            if wanted[1]:
                torch.mm(y.t(), x, out=grad_weight[columns])
            if wanted[2]:
                torch.sum(y, 0, dtype=torch.float32, out=grad_bias[columns])
    grad_x = grad_x.copy_(sum_x) if wanted[0] else grad_x
    return _without_padding((grad_x, grad_weight, grad_bias), outputs)


def _row_chunks(x: Tensor, weight: Tensor, grad_weight: bool) -> Iterator[tuple[slice, Tensor]]:
    """(rows, room for as many rows of y, which the next chunk gets, too), over all rows."""
    rows, inputs = x.shape
    outputs, itemsize = weight.shape[0], x.element_size()
    size = chunk_rows(rows, outputs, inputs, itemsize, grad_weight)
    buffer = x.new_empty((min(size, rows), outputs))
    for first in range(0, rows, size):
        place = slice(first, min(first + size, rows))
        yield place, buffer[: place.stop - first]


def _logits_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: slice,
    room: Tensor,
    logits: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor | None]:
    """(y of some rows, what is still to be written of the caller's ``logits``, if anything).

    The product goes straight into them where they are y itself and as wide.
    """
    if logits.numel():
        theirs, plain = logits[rows], not form.cap and form.outer == 1
        if not plain or theirs.dtype != x.dtype or theirs.shape[1] != room.shape[1]:
            _product(x[rows], weight, bias, room)
            return room, theirs
        room = theirs
    _product(x[rows], weight, bias, room)
    return room, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (fp32) += a b, the sum never rounded to the operands' dtype where a library can."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _logits(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x.new_empty(0)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def gradients_of(
    x: Tensor, weight: Tensor, wanted: list[bool], grad_weight: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for g_x, g_w, g_b; what chunks of rows add up starts at zero."""
    outputs, inputs = weight.shape
    return (
        x.new_empty(tuple(x.shape) if wanted[0] else 0),
        x.new_zeros((outputs, inputs) if wanted[1] else 0, dtype=grad_weight),
        x.new_zeros((outputs,) if wanted[2] else 0, dtype=torch.float32),
    )


def _padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same with outputs of zeros at the end."""
    missing = _padding(weight)
    if not missing:
        return weight, bias
    wide = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    return wide, None if bias is None else torch.nn.functional.pad(bias, (0, missing))


def _padding(weight: Tensor) -> int:
    """Outputs that are missing to what a GPU's products like."""
    return -weight.shape[0] % _ALIGN if weight.is_cuda else 0


def _without_padding(
    gradients: tuple[Tensor, Tensor, Tensor], outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = gradients
    return grad_x, grad_weight[:outputs], grad_bias[:outputs]


def _valid(target: Tensor | None, weight: Tensor) -> Tensor | None:
    """``target``, contiguous. On a GPU one out of range trips gather's assertion, as in the exact
    graph; on a CPU whoever reads it raises."""
    if target is not None and target.is_cuda:
        weight[:, 0].gather(0, target)
    return _dense(target)


def _dense(target: Tensor | None) -> Tensor | None:
    return None if target is None else target.contiguous()


for _name, _own in (
    ("head_statistics", _head_statistics),
    ("head_gradients", _head_gradients),
    ("head_both", both),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _own, _device)


@torch.library.register_fake("hot::head_statistics")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty((STATISTICS, x.shape[0]), dtype=torch.float32)
    return statistics, _logits(x, weight, logits_dtype)


@torch.library.register_fake("hot::head_gradients")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    lse: Tensor,
    coefficients: Tensor,
    extra: Tensor | None,
    extra_scale: float,
    inner: float,
    cap: bool,
    outer: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_of(x, weight, wanted, x.dtype)


@torch.library.register_fake("hot::head_both")
def fake_both(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    column: Tensor | None,
    coefficients: Tensor,
    inner: float,
    cap: bool,
    outer: float,
    logits_dtype: torch.dtype | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of ``both``."""
    statistics = x.new_empty((STATISTICS, x.shape[0]), dtype=torch.float32)
    gradients = gradients_of(x, weight, wanted, torch.float32)
    return statistics, _logits(x, weight, logits_dtype), *gradients
