"""y = x W^T on INT8: one plain function, traced into graphs, measured on tensors, and priced."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

import hot_compile.runtime.ops  # noqa: F401  (defines the operators)
from hot_compile.passes.cost.linear import (
    MOST_ROWS,
    Cost,
    I,
    L,
    O,
    Rates,
    Shape,
    Sized,
    at,
    exact_cost,
    first_that_pays,
    seconds,
)
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

hot = torch.ops.hot
_BITS = 8


def int8_product(
    x: Tensor,
    weight: Tensor,
    ones: Tensor | None,
    bias: Tensor | None,
    weight_is_io: bool,
    dtype: torch.dtype,
) -> Tensor:
    """x W^T [L, O] of ``dtype`` from integers: a scale per row of x and per output of W.

    Both operands are transformed along I in blocks of 16 (HT16, which cancels in the product) and
    rounded to nearest: an outlier of one channel is spread over 16 (docs/adr/0018). A row of x with
    inf or NaN gives a row of NaN, an output of W with one a column of NaN.

    Args:
        x: [L, I]. weight: [O, I], or [I, O] with ``weight_is_io``.
        ones, bias: fp32 [L] of ones and [O], added in the product's epilogue; both or neither.
    """
    x_q, x_scale = hot.quantize_rows.default(x, _BITS, True, False)
    if weight_is_io:
        args = (weight, HADAMARD_ORDER, 1, _BITS, True, False)
        w_q, w_scale, _ = hot.quantize_columns.default(*args)
    else:
        w_q, w_scale = hot.quantize_rows.default(weight, _BITS, True, False)
    return hot.scaled_int_mm.default(x_q, w_q, x_scale, w_scale, ones, bias, dtype)


@cache
def forward_cost(weight_is_io: bool) -> Cost:
    """All that ``int8_product`` does."""
    bill: list[Cost] = []
    weight = Sized(bill, I, O) if weight_is_io else Sized(bill, O, I)
    args: Any = (Sized(bill, L, I), weight, None, None, weight_is_io, torch.float32)
    int8_product(*args)
    return sum(bill, Cost())


@dataclasses.dataclass(frozen=True)
class Price:
    """One layer's forward on one device."""

    rates: Rates
    dtype: str
    shape: Shape
    weight_is_io: bool

    def gain(self, rows: int | None = None) -> float:
        """How many times faster than exact the product is predicted to be, of so many rows."""
        shape = self.shape if rows is None else dataclasses.replace(self.shape, rows=rows)
        ours = seconds(forward_cost(self.weight_is_io), self.rates, self.dtype)
        return at(seconds(exact_cost(1), self.rates, self.dtype), shape) / at(ours, shape)

    def rows_that_pay(self, least: float) -> int | None:
        """From how many rows on it is ``least`` times faster; None: from none."""
        return first_that_pays(lambda n: self.gain(n) >= least, self.shape.rows, MOST_ROWS)
