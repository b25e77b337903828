"""y = x W^T on INT8: one plain function, traced into graphs, measured on tensors, and priced."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

import hot_compile.runtime.ops  # noqa: F401  (defines the operators)
from hot_compile.passes.base.site import hint
from hot_compile.passes.cost.linear import (
    Cost,
    E,
    Entry,
    I,
    L,
    O,
    Price,
    Rates,
    Shape,
    Sized,
    exact_cost,
    seconds,
)
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

aten, hot, prims = torch.ops.aten, torch.ops.hot, torch.ops.prims
_BITS = 8
_QMAX = 127.0
_TINY = 2.0**-116
"""The least absmax of a row that its scale is taken from, so that no reciprocal overflows."""
SAMPLED = 1024
"""Rows of x, evenly spaced, that show which of its columns are large."""
_OCTAVES = 8.0
"""Columns larger than the usual one by more powers of two are made smaller as by so many."""
_ONE = 127 << 23
_MOST_EVENED = 24576
"""Columns that ``quantize_rows`` takes factors for on a GPU."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How one layer's operands are quantised."""

    rotated: bool = True
    """Both are transformed along I in blocks of 16 before, by operators of the runtime. Else plain
    operators round them as they are, which Inductor fuses into the kernel that makes x."""
    weight_is_io: bool = False
    """W comes as [I, O]."""
    fused: bool = False
    """Not rotated, and there is such a kernel: x need not be read for it."""
    evened: bool = True
    """If rotated: large columns of x are made smaller before, and those of W larger."""


def int8_product(
    x: Tensor,
    weight: Tensor,
    ones: Tensor | None,
    bias: Tensor | None,
    form: Form,
    dtype: torch.dtype,
) -> Tensor:
    """x W^T [L, O] of ``dtype`` from integers: a scale per row of x and per output of W.

    Rounded to nearest. ``form.rotated`` spreads an outlier of one channel over 16 (HT16, which
    cancels in the product: docs/adr/0018), after large columns of x were made smaller, and those of
    W larger (``_evened``). A row of x with inf or NaN gives a row without a finite value, an output
    of W with one a column.

    Args:
        x: [L, I]. weight: [O, I], or [I, O] with ``form.weight_is_io``.
        ones, bias: fp32 [L] of ones and [O], added in the product's epilogue; both or neither.
    """
    quantised = _rotated(x, weight, form) if form.rotated else _plain(x, weight, form)
    (x_q, x_scale), (w_q, w_scale) = quantised
    return hot.scaled_int_mm.default(x_q, w_q, x_scale, w_scale, ones, bias, dtype)


Rows = tuple[Tensor, Tensor]
"""Integers [rows, I], contiguous, and fp32 scales [rows]."""


def _rotated(x: Tensor, weight: Tensor, form: Form) -> tuple[Rows, Rows]:
    evened = form.evened and hint(x.shape[0]) > 0 and hint(x.shape[1]) <= _MOST_EVENED
    less, more = _evened(x) if evened else (None, None)
    rows = _rotated_rows(x, less)
    if not form.weight_is_io:
        return rows, _rotated_rows(weight, more)
    if more is not None:
        weight = aten.mul.Tensor(weight, aten.unsqueeze.default(more, 1))
    args = (weight, HADAMARD_ORDER, 1, _BITS, True, False)
    q, scale = hot.quantize_columns.default(*args)
    return rows, (q, scale)


def _rotated_rows(x: Tensor, factors: Tensor | None) -> Rows:
    given = () if factors is None else (False, factors)
    return hot.quantize_rows.default(x, _BITS, True, False, *given)


def _evened(x: Tensor) -> tuple[Tensor, Tensor]:
    """(of x, of W): fp32 powers of two [I] for their columns, which cancel in the product.

    By what a column's largest sampled value is above the columns' geometric mean, x's is made
    smaller and W's larger, half of the exponent each; other columns stay as they are. Logarithms
    are the bits of floats, and sums are of integers, so that a checkpointed region computes the
    same again, in whatever order.
    """
    step = max(1, hint(x.shape[0]) // SAMPLED)
    some = aten.slice.Tensor(x, 0, 0, sys.maxsize, step)
    some = aten.abs.default(prims.convert_element_type.default(some, torch.float32))
    largest = aten.amax.default(aten.view.dtype(some, torch.int32), [0])
    total = aten.sum.dim_IntList(largest, [0], dtype=torch.int64)
    log, total = (prims.convert_element_type.default(n, torch.float32) for n in (largest, total))
    above = aten.sub.Tensor(log, aten.mul.Tensor(total, 1 / hint(x.shape[1])))
    above = aten.clamp_max.default(aten.clamp_min.default(above, 0.0), _OCTAVES * 2**23)
    root = aten.mul.Tensor(above, 2.0**-24)
    octaves = prims.convert_element_type.default(aten.round.default(root), torch.int32)
    less, more = (aten.mul.Tensor(octaves, way << 23) for way in (-1, 1))
    less, more = (aten.add.Tensor(bits, _ONE) for bits in (less, more))
    return aten.view.dtype(less, torch.float32), aten.view.dtype(more, torch.float32)


def _plain(x: Tensor, weight: Tensor, form: Form) -> tuple[Rows, Rows]:
    if not form.weight_is_io:
        return _plain_rows(x), _plain_rows(weight)
    q, scale = _plain_rows(aten.permute.default(weight, [1, 0]))
    return _plain_rows(x), (aten.clone.default(q, memory_format=torch.contiguous_format), scale)


def _plain_rows(x: Tensor) -> Rows:
    """What ``hot::quantize_rows`` does but for the transform and for padding."""
    values = prims.convert_element_type.default(x, torch.float32)
    size = aten.amax.default(aten.abs.default(values), [1], True)
    size = aten.clamp_min.default(size, _TINY)
    factor = aten.mul.Tensor(aten.reciprocal.default(size), _QMAX)
    rounded = aten.round.default(aten.mul.Tensor(values, factor))
    scale = aten.squeeze.dim(aten.mul.Tensor(size, 1 / _QMAX), 1)
    return prims.convert_element_type.default(rounded, torch.int8), scale


@cache
def forward_cost(form: Form) -> Cost:
    """All that ``int8_product`` does."""
    bill: list[Entry] = []
    x, weight = Sized(bill, L, I), Sized(bill, O, I)
    if form.rotated:
        given = Sized(bill, I, O) if form.weight_is_io else weight
        plain = dataclasses.replace(form, evened=False)
        args: Any = (x, given, None, None, plain, torch.float32)
        int8_product(*args)
        own = (entry.cost for entry in bill)
        return sum(own, _evening_cost(form) if form.evened else Cost())
    read = weight.bytes if form.fused else x.bytes + weight.bytes
    written = x.values + weight.values
    product = Cost(int_ops=2 * L * O * I, results=L * O, calls=2)
    return product + Cost(bytes=read + written, calls=int(not form.fused))


def _evening_cost(form: Form) -> Cost:
    """W is multiplied by what quantises it, or, where that goes down its columns, before."""
    multiplied = 2 * O * I * E if form.weight_is_io else 0
    return Cost(bytes=SAMPLED * I * E + multiplied, calls=2)


def forward_price(rates: Rates, dtype: str, shape: Shape, form: Form) -> Price:
    """What the product takes."""
    exact, ours = (seconds(cost, rates, dtype) for cost in (exact_cost(1), forward_cost(form)))
    return Price(exact, ours, shape.numbers, shape.rows)
