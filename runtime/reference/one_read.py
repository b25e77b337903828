"""Definition of one quantisation of grad_output that serves both products.

g_y is read once. Its rows get a scale each, over columns that a power of two has made equal before
(``equal``, from a sample of the rows), and the same INT8 integers feed g_x, row by row, and g_w,
transposed. A row's scale lies on g_w's contracted dimension: it is folded into x when x is brought
from its storage onto its columns' grids (``rescale_int4``, ``rescale_int8``). See docs/adr/0005.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import (
    COL_HASH,
    MASK32,
    MIX_HASH,
    ROW_HASH,
    pad_rows,
    quantize,
    scale_of,
    transform_rows,
)
from hot_compile.runtime.reference.sizes import (
    CONTRACT_ALIGN,
    HADAMARD_ORDER,
    contracted_rows,
    round_up,
    sum_rows,
    unit_rows,
)

SAMPLED_ROWS = 256
"""Rows of grad_output that decide how columns are made equal."""
MOST_LIFT = 8
"""A column is lifted by at most 2^8 against the largest one."""
ONE_READ_TINY = 2.0**-100
"""A row whose largest lifted magnitude is below this quantises to zeros."""
_MAGIC_BITS = 0x4B400000  # of the float 1.5 * 2^23, to which providers add values to round them


def equal_of(grad_output: Tensor) -> Tensor:
    """Powers of two in [2^-8, 1], fp32 [O]: how large each column of grad_output [L, O] is.

    From the absmax over ``SAMPLED_ROWS`` rows at even distances, relative to the largest column's.
    A sample of zeros makes all columns equal; what it misses costs bits, never correctness.
    """
    rows, cols = grad_output.shape
    count = min(rows, SAMPLED_ROWS)
    if count == 0 or cols == 0:
        return torch.ones(cols, device=grad_output.device)
    picked = torch.arange(count, device=grad_output.device) * rows // count
    absmax = grad_output[picked].float().abs().amax(0)
    exponent = (absmax.view(torch.int32) & 0x7FFFFFFF) >> 23
    exponent = exponent.clamp(max=254)  # NaN, whose sign may be set, and inf as the largest finite
    lift = (exponent.max() - exponent).clamp(max=MOST_LIFT)
    return torch.exp2(-lift.float())


def one_read_scale_of(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of rows whose largest magnitude times 2^-8 / equal is ``absmax``.

    scale: of an integer times ``equal``. reciprocal: gives 256 times the quotient, in fixed point.
    """
    usable = (absmax >= ONE_READ_TINY) & (absmax < float("inf"))
    safe = torch.where(usable, absmax, 1.0)
    zero, nan = torch.zeros_like(absmax), torch.full_like(absmax, float("nan"))
    qmax, fixed = (torch.tensor(v, device=absmax.device) for v in (127.0, 32512.0))
    scale = torch.where(usable, safe / qmax * 256.0, torch.where(absmax < ONE_READ_TINY, zero, nan))
    return scale, torch.where(usable, fixed / safe, zero)


def quantize_fixed(values: Tensor, factor: Tensor) -> Tensor:
    """INT8 of ``values`` [R, C] times ``factor`` [R] / 256, stochastically rounded.

    The product, exact as a fused multiply-add has it, is rounded to 8 fractional bits; 8 bits
    hashed from it and its place are added and the fraction is dropped: unbiased, exact on the grid,
    and never beyond 127 in magnitude.
    """
    product = values.double() * factor.double().unsqueeze(1)
    return round_fixed(torch.where(factor.unsqueeze(1) == 0, 0.0, product))


def round_fixed(product: Tensor) -> Tensor:
    """INT8 of ``product`` [R, C] fp64 / 256: see ``quantize_fixed``."""
    fixed = product.round().to(torch.int64)
    rows = torch.arange(product.shape[0], device=product.device, dtype=torch.int64).unsqueeze(1)
    cols = torch.arange(product.shape[1], device=product.device, dtype=torch.int64)
    place = ((rows * ROW_HASH) ^ (cols * COL_HASH)) & MASK32
    dither = ((fixed + _MAGIC_BITS ^ place) * MIX_HASH & MASK32) >> 24
    return (fixed + dither >> 8).to(torch.int8)


def quantize_one_read(
    grad_output: Tensor, rank: int, tokens: int, summed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_output [L, O] for g_x and for g_w from one read, INT8, stochastically rounded.

    g_x: row_q int8 [L, O rounded up to 32], row_scale fp32 [L]:
    value ~ row_q * row_scale[:, None] * equal[None, :].
    g_w: col_q int8 [O, K], fold fp32 [K]: value ~ (col_q * equal[:, None] * fold[None, :])^T.
    rank 0: the very integers of row_q, transposed; a unit is 16 rows. rank 8: HLA(8) of each unit
    of 16 rows (``transform_rows``), whose 8 rows share a scale from the bound |h| <= sum |g| / 4,
    summed over the rows' absmax: up to 2 bits wide, far below what HLA itself leaves out.
    peak fp32 [units] is the largest ``fold`` of each unit. equal fp32 [O]: see ``equal_of``.
    sums fp32 [units / 4, O], empty unless ``summed``: they add up to the sum over grad_output's
    rows, the gradient of a bias. Which rows each takes, and in which order, is a provider's choice.
    """
    rows, cols = grad_output.shape
    equal = equal_of(grad_output)
    values = grad_output.float() * (2.0**-MOST_LIFT / equal)  # exact: powers of two
    absmax = values.abs().amax(1) if cols else values.new_zeros(rows)
    row_scale, reciprocal = one_read_scale_of(absmax)
    row_q = quantize_fixed(values, reciprocal)
    contracted, unit = contracted_rows(rows, rank, tokens), unit_rows(rank)
    if rank == 0:
        fold, col_q = row_scale, row_q
    else:
        fold, col_q = _half_rows(values, absmax, rank, tokens)
    fold = torch.nn.functional.pad(fold, (0, contracted - fold.shape[0]))
    col_q = pad_rows(col_q, contracted).t().contiguous()
    peak = fold.reshape(contracted // unit, unit).amax(1)
    row_q = torch.nn.functional.pad(row_q, (0, round_up(cols, CONTRACT_ALIGN) - cols))
    sums = _sums(grad_output.float(), sum_rows(peak.shape[0]) if summed else 0)
    return row_q, row_scale, col_q, fold, peak, equal, sums


def _sums(values: Tensor, count: int) -> Tensor:
    """``values`` [L, O] added up to [count, O]."""
    rows, cols = values.shape
    each = -(-rows // count) if count else 0
    return pad_rows(values[: each * count], each * count).reshape(count, each, cols).sum(1)


def _half_rows(values: Tensor, absmax: Tensor, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(fold, integers) of the kept rows of every unit, which share the unit's scale."""
    kept = transform_rows(values, rank, tokens)
    bound = transform_rows(absmax.unsqueeze(1), HADAMARD_ORDER, tokens)[::HADAMARD_ORDER, 0]
    scale, reciprocal = (t.repeat_interleave(rank) for t in one_read_scale_of(bound))
    return scale, quantize_fixed(kept, reciprocal)


def quantize_weight(weight: Tensor, equal: Tensor, inputs_first: bool) -> tuple[Tensor, Tensor]:
    """W times ``equal``, INT8 per input column, written with O contiguous for g_x.

    weight: [O, I], or [I, O] if ``inputs_first``. Returns q int8 [I, O rounded up to 32] and scale
    fp32 [I]: equal * W ~ (q * scale[:, None])^T. Rounded to nearest.
    """
    values = (weight if inputs_first else weight.t()).float() * equal
    inputs, outputs = values.shape
    absmax = values.abs().amax(1) if outputs else values.new_zeros(inputs)
    scale, reciprocal = scale_of(absmax, 8)
    q = quantize(values.contiguous(), reciprocal.unsqueeze(1), 8, stochastic=False)
    return torch.nn.functional.pad(q, (0, round_up(outputs, CONTRACT_ALIGN) - outputs)), scale
