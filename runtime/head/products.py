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

from hot_compile.runtime.head.parts import (
    ALIGN,
    Part,
    add_product,
    missing_outputs,
    multiply_back,
    multiply_parts,
    parts_of,
    width_of,
)
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
    outputs, parts = weight.shape[0], parts_of(weight, bias, multiply is not None)
    gradients = _sums_of(x, width_of(parts), wanted)
    with _exact(x.device):
        for rows, g in _row_chunks(x, width_of(parts), wanted[1]):
            y, theirs = _logits_of(x[rows], parts, g, logits[rows], form)
            chunk = Chunk(y, outputs, None if target is None else target[rows], column, form)
            chunk_statistics(chunk, statistics[:, rows], theirs)
            if coefficients is not None:
                chunk_gradient(chunk, statistics[1, rows], Gradient(g, coefficients[:, rows]))
                _add_gradients(g, x, parts, rows, gradients, multiply)
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
    outputs, parts = weight.shape[0], parts_of(weight, bias, multiply is not None)
    gradients = _sums_of(x, width_of(parts), wanted)
    with _exact(x.device):
        for rows, y in _row_chunks(x, width_of(parts), wanted[1]):
            multiply_parts(x[rows], parts, y)
            outside = None if extra is None else extra[rows]
            chunk = Chunk(y, outputs, None if target is None else target[rows], column, form)
            gradient = Gradient(y, coefficients[:, rows], outside, extra_scale)
            chunk_gradient(chunk, lse[rows], gradient)
            _add_gradients(y, x, parts, rows, gradients, multiply)
    return _without_padding(gradients, outputs)


def _add_gradients(
    g: Tensor,
    x: Tensor,
    parts: tuple[Part, ...],
    rows: slice,
    gradients: tuple[Tensor, Tensor, Tensor],
    multiply: Multiply | None,
) -> None:
    """What rows whose gradient of y is ``g`` give to (g_x, g_w, g_b), empty if not wanted."""
    grad_x, grad_weight, grad_bias = gradients
    first = rows.start == 0  # nothing is there yet to add to
    own_x, own_weight = multiply(g, x[rows], parts[0].weight) if multiply else (None, None)
    if own_x is not None:
        grad_x[rows] = own_x
    elif grad_x.numel():
        multiply_back(g, parts, grad_x[rows])
    if own_weight is not None:
        grad_weight.copy_(own_weight) if first else grad_weight.add_(own_weight)
    elif grad_weight.numel():
        for part in parts:
            add_product(grad_weight[part.columns], g[:, part.columns].t(), x[rows], first)
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
    room = outputs + missing_outputs(weight)
    grad_x, grad_weight, grad_bias = gradients_of(x, room, wanted, x.dtype)
    sum_x = torch.empty_like(grad_x, dtype=torch.float32)
    width = chunk_columns(rows, outputs, x.element_size())
    scratch = x.new_empty((rows, -(-width // ALIGN) * ALIGN))
    target = _dense(target)
    with _exact(x.device):
        for first in range(0, outputs, width):
            last = min(first + width, outputs)
            columns = slice(first, last)
            # only the last one may be padded: no more than a chunk is copied
            own = None if bias is None else bias[columns]
            parts = parts_of(weight[columns], own, whole=True)
            wide = slice(first, first + width_of(parts))
            y = scratch[:, : width_of(parts)]
            multiply_parts(x, parts, y)
            own = None if column is None else column[columns]
            place = None if target is None else target - first
            outside = None if extra is None else extra[:, columns]
            gradient = Gradient(y, coefficients, outside, extra_scale)
            chunk_gradient(Chunk(y, last - first, place, own, form), lse, gradient)
            if wanted[0]:
                add_product(sum_x, y, parts[0].weight, first == 0)
            if wanted[1]:
                torch.mm(y.t(), x, out=grad_weight[wide])
            if wanted[2]:
                torch.sum(y, 0, dtype=torch.float32, out=grad_bias[wide])
    grad_x = grad_x.copy_(sum_x) if wanted[0] else grad_x
    return _without_padding((grad_x, grad_weight, grad_bias), outputs)


def _row_chunks(x: Tensor, outputs: int, grad_weight: bool) -> Iterator[tuple[slice, Tensor]]:
    """(rows, room for as many rows of y, which the next chunk gets, too), over all rows."""
    rows, inputs = x.shape
    size = chunk_rows(rows, outputs, inputs, x.element_size(), grad_weight)
    buffer = x.new_empty((min(size, rows), outputs))
    for first in range(0, rows, size):
        place = slice(first, min(first + size, rows))
        yield place, buffer[: place.stop - first]


def _logits_of(
    x: Tensor, parts: tuple[Part, ...], room: Tensor, logits: Tensor, form: Form
) -> tuple[Tensor, Tensor | None]:
    """(y of some rows, what is still to be written of the caller's ``logits``, if anything).

    The product goes straight into them where they are y itself and as wide.
    """
    plain = not form.cap and form.outer == 1
    if logits.dtype == x.dtype and logits.shape[-1] == room.shape[1] and plain:
        multiply_parts(x, parts, logits)
        return logits, None
    multiply_parts(x, parts, room)
    return room, logits if logits.numel() else None


def _logits(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x.new_empty(0)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def gradients_of(
    x: Tensor, outputs: int, wanted: list[bool], grad_weight: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for g_x, g_w, g_b."""
    return (
        x.new_empty(tuple(x.shape) if wanted[0] else 0),
        x.new_empty((outputs, x.shape[1]) if wanted[1] else 0, dtype=grad_weight),
        x.new_zeros((outputs,) if wanted[2] else 0, dtype=torch.float32),
    )


def _sums_of(x: Tensor, outputs: int, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The same for what chunks of rows add up: the first one writes, and without any it is zero."""
    gradients = gradients_of(x, outputs, wanted, torch.float32)
    if not x.shape[0]:
        gradients[1].zero_()
    return gradients


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
    return gradients_of(x, weight.shape[0], wanted, x.dtype)


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
    gradients = gradients_of(x, weight.shape[0], wanted, torch.float32)
    return statistics, _logits(x, weight, logits_dtype), *gradients
