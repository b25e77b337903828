"""How a layer's backward may be computed: one entry of a table and one function a strategy.

The functions are plain: tensors in, tensors out. The same function is run on tensors by calibration
(``measure``) and by ``benchmarks/layers.py``, made into a graph's nodes by ``rewrite``
(``emit.Traced``), and priced by the sum of its operators' costs (``cost.Sized``).

Shapes: g_y [L, O], x [L, I], W [O, I]; g_x = g_y W [L, I], g_w = g_y^T x [O, I].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hot_compile.passes.layers.baselines
import hot_compile.runtime.ops  # noqa: F401  (likewise)
from hot_compile.config import BASELINES, Strategy

hot, aten = torch.ops.hot, torch.ops.aten


@dataclasses.dataclass(frozen=True)
class How:
    """All that a strategy's function is told besides the tensors."""

    gx: bool = True
    """g_x is wanted."""
    gw: bool = True
    """g_w is wanted."""
    dtype: torch.dtype = torch.float32
    """Of both results."""
    gx_bits: int = 8
    per_row: bool = True
    """Scales of g_y per row for g_x, or one for all of it."""
    per_channel: bool = True
    """Scales per column of W, x and, for g_w, g_y."""
    rank: int = 0
    """Rows kept of every 16 for g_w; 0: rows are not transformed."""
    tokens: int = 1
    """Rows of one sample where rows are grouped across the batch; 1: consecutive rows."""
    packed: bool = False
    """g_x's operands lie two values a byte, for INT4 tensor cores."""
    one_read: bool = False
    """g_y is quantised once for both products (docs/adr/0005)."""
    fused: bool = False
    """g_y is put together from several tensors' gradients, maybe of other sizes (``one_read``)."""
    summed: bool = False
    """g_b is wanted too, of those who can give it on the way (``one_read``)."""
    weight_is_io: bool = False
    """W comes as [I, O]."""
    grad_weight_is_io: bool = False
    """g_w is wanted as [I, O]."""


class Gradients(NamedTuple):
    """A strategy's results; None where it leaves the exact product (or has none to give)."""

    gx: Tensor | None = None
    gw: Tensor | None = None
    sums: Tensor | None = None
    """Partial sums of g_y over its rows [n, O], fp32, with ``How.summed``."""


Kept = tuple[Tensor, ...]
"""What a strategy makes of x alone. Empty where g_w is not its business."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One strategy."""

    gradients: Callable[[Tensor, Kept, Tensor, How], Gradients]
    """(g_y, what ``keep`` made of x, W, how) -> results."""
    keep: Callable[[Tensor, How], Kept] = lambda x, how: (x,)
    """(x, how) -> x as the products want it. With ``recompute=False`` this runs in the forward and
    its result is what crosses to the backward; else it runs in the backward, on x itself, and what
    crosses is storage's decision."""
    quantises_x: bool = False
    """Its g_w is of a quantised x: worth measuring, and smaller to keep than x."""
    low_rank: bool = False
    """It takes option ``rank``."""
    grouped: bool = False
    """It takes rows in groups of 16, as option ``rows`` says."""
    one_read: bool = False
    """It has a form that reads g_y once for both products."""
    convolves: bool = True
    """``rewrite_conv`` has a form of it for convolutions."""

    def __call__(self, g_y: Tensor, x: Tensor, weight: Tensor, how: How) -> Gradients:
        """Both gradients of one layer by this strategy, from tensors to tensors."""
        return self.gradients(g_y, self.keep(x, how) if how.gw else (), weight, how)


def exact(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """Nothing is replaced."""
    return Gradients()


def gx_only(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """g_x by HQ; g_w, if there is one, stays exact."""
    if not how.gx:
        return Gradients()
    rows = hot.quantize_rows.default(g_y, how.gx_bits, how.per_row, True, *_packed(how))
    return Gradients(gx=_grad_input(rows, weight, how))


def gw_only(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """g_w of all rows in INT8; g_x, if there is one, stays exact."""
    if not how.gw:
        return Gradients()
    return _two_reads(g_y, kept, weight, dataclasses.replace(how, gx=False))


def quantised_columns(x: Tensor, how: How) -> Kept:
    """x on the integer grid of its columns, or as it waits for g_y's scales (``one_read``)."""
    if how.one_read:
        return tuple(hot.compress_int8.default(x, how.rank, how.tokens))
    args = (x, how.rank, how.tokens, 8, how.per_channel, False)
    q, scale = hot.quantize_columns.default(*args)
    return q, scale


def _two_read_columns(x: Tensor, how: How) -> Kept:
    """x as g_w alone wants it: g_y's scales are its own."""
    return quantised_columns(x, dataclasses.replace(how, one_read=False))


def integers(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """Both products on integers: g_x by HQ, g_w of all rows, or (``rank``) of their low pass."""
    return (_one_read if how.one_read else _two_reads)(g_y, kept, weight, how)


def _two_reads(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """g_y is quantised along its rows for g_x and along its columns for g_w."""
    per_column = (how.rank, how.tokens, 8, how.per_channel, True)
    if how.gx and how.gw:
        args = (g_y, how.gx_bits, how.per_row, how.rank, how.tokens, how.per_channel)
        *rows, q, scale = hot.quantize_grad.default(*args, *_packed(how))
    elif how.gx:
        return gx_only(g_y, kept, weight, how)
    else:
        q, scale = hot.quantize_columns.default(g_y, *per_column)
    x_q, x_scale = kept
    gw = _grad_weight((q, x_q), (scale, x_scale), how)
    return Gradients(_grad_input(rows, weight, how) if how.gx else None, gw)


def _one_read(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
    """g_y is read and quantised once, transformed; its rows' scales are folded into x."""
    given = (how.summed, how.fused) if how.fused else (True,) if how.summed else ()
    quantised = hot.quantize_one_read.default(g_y, how.rank, how.tokens, *given)
    row_q, row_scale, column_q, fold, peak, equal, sums = quantised
    if how.fused:
        weight = _times(weight, aten.slice.Tensor(equal, 0, 0, g_y.shape[1]), how)
    gx = _grad_input((row_q, row_scale), weight, how)
    x_q, x_scale = hot.rescale_int8.default(*kept, fold, peak)
    args = (equal, x_q, x_scale, g_y.shape[1], how.grad_weight_is_io, how.dtype)
    gw = hot.hadamard_int_mm.default(column_q, *args)
    return Gradients(gx, gw, sums if how.summed else None)


def _times(weight: Tensor, equal: Tensor, how: How) -> Tensor:
    """W with its outputs times ``equal``."""
    dim = 0 if how.weight_is_io else 1
    return aten.mul.Tensor(weight, aten.unsqueeze.default(equal, dim))


def _grad_input(rows: Any, weight: Tensor, how: How) -> Tensor:
    """g_x of g_y's quantised rows; W is transformed along O and quantised here."""
    if how.weight_is_io:
        args: tuple[Any, ...] = (weight, how.gx_bits, how.per_channel, False, *_packed(how))
        w_q, w_scale = hot.quantize_rows.default(*args)
    else:
        args = (weight, 16, 1, how.gx_bits, how.per_channel, False, *_packed(how))
        w_q, w_scale = hot.quantize_columns.default(*args)
    q, scale = rows
    return hot.scaled_int_mm.default(q, w_q, scale, w_scale, None, None, how.dtype)


def _grad_weight(operands: Any, scales: Any, how: How) -> Tensor:
    """The integer product of (g_y, x), each [channels, rows], as [O, I] or [I, O]."""
    if how.grad_weight_is_io:
        operands, scales = operands[::-1], scales[::-1]
    return hot.scaled_int_mm.default(*operands, *scales, None, None, how.dtype)


def _packed(how: How) -> tuple[bool, ...]:
    """The operators' last argument, which graphs show only where it says something."""
    return (True,) if how.packed else ()


def _baseline(method: Strategy) -> Spec:
    """Another paper's method, fake-quantised: for comparing accuracy only."""
    ops = torch.ops.hot_baseline

    def gradients(g_y: Tensor, kept: Kept, weight: Tensor, how: How) -> Gradients:
        gx = gw = None
        if how.gx:
            weight = aten.permute.default(weight, [1, 0]) if how.weight_is_io else weight
            gx = ops.grad_input.default(g_y, weight, str(method), how.rank)
        if how.gw:
            gw = ops.grad_weight.default(g_y, *kept, str(method), how.rank)
            gw = aten.permute.default(gw, [1, 0]) if how.grad_weight_is_io else gw
        return Gradients(gx, gw)

    return Spec(gradients, low_rank=method is Strategy.LBP_WHT, convolves=False)


def _integer(**facts: Any) -> Spec:
    return Spec(integers, quantised_columns, quantises_x=True, one_read=True, **facts)


STRATEGIES: dict[Strategy, Spec] = {
    Strategy.HLA8: _integer(low_rank=True, grouped=True),
    Strategy.INT8: _integer(),
    Strategy.GX_ONLY: Spec(gx_only),
    Strategy.GW_ONLY: Spec(gw_only, _two_read_columns, quantises_x=True),
    Strategy.EXACT: Spec(exact),
    **{method: _baseline(method) for method in sorted(BASELINES)},
}
"""Every strategy. To add one: a name in ``config.Strategy``, a function, an entry here."""
