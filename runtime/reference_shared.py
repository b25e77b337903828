"""Definition of the operators around one quantisation of grad_output that serves both products.

g_y is read once. Its rows get a scale each, over columns that a power of two has made equal before
(``equal``, from a sample of the rows), and the same INT8 integers feed g_x, row by row, and g_w,
transposed. A row's scale lies on g_w's contracted dimension: it is folded into x when x is brought
from its storage onto its columns' grids (``rescale_int4``, ``rescale_int8``). See docs/adr/0005.

As in ``reference.py``, each float operation is one IEEE fp32 operation in the order written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.ops import (
    CONTRACT_ALIGN,
    HADAMARD_ORDER,
    INT4_GROUP,
    UNITS_PER_TILE,
    contracted_rows,
    round_up,
    sum_rows,
    unit_rows,
)
from hot_compile.runtime.reference import (
    _COL_HASH,
    _MASK32,
    _MIX_HASH,
    _ROW_HASH,
    TINY,
    _bf16_outward,
    _pad_rows,
    _transform_rows,
    quantize,
    scale_of,
)

SAMPLED_ROWS = 256
"""Rows of grad_output that decide how columns are made equal."""
MOST_LIFT = 8
"""A column is lifted by at most 2^8 against the largest one."""
SHARED_TINY = 2.0**-100
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


def shared_scale_of(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of rows whose largest magnitude times 2^-8 / equal is ``absmax``.

    scale: of an integer times ``equal``. reciprocal: gives 256 times the quotient, in fixed point.
    """
    usable = (absmax >= SHARED_TINY) & (absmax < float("inf"))
    safe = torch.where(usable, absmax, 1.0)
    zero, nan = torch.zeros_like(absmax), torch.full_like(absmax, float("nan"))
    qmax, fixed = (torch.tensor(v, device=absmax.device) for v in (127.0, 32512.0))
    scale = torch.where(usable, safe / qmax * 256.0, torch.where(absmax < SHARED_TINY, zero, nan))
    return scale, torch.where(usable, fixed / safe, zero)


def quantize_fixed(values: Tensor, factor: Tensor) -> Tensor:
    """INT8 of ``values`` [R, C] times ``factor`` [R] / 256, stochastically rounded.

    The product, exact as a fused multiply-add has it, is rounded to 8 fractional bits; 8 bits
    hashed from it and its place are added and the fraction is dropped: unbiased, exact on the grid,
    and never beyond 127 in magnitude.
    """
    product = values.double() * factor.double().unsqueeze(1)
    fixed = torch.where(factor.unsqueeze(1) == 0, 0.0, product).round().to(torch.int64)
    rows = torch.arange(values.shape[0], device=values.device, dtype=torch.int64).unsqueeze(1)
    cols = torch.arange(values.shape[1], device=values.device, dtype=torch.int64)
    place = ((rows * _ROW_HASH) ^ (cols * _COL_HASH)) & _MASK32
    dither = ((fixed + _MAGIC_BITS ^ place) * _MIX_HASH & _MASK32) >> 24
    return (fixed + dither >> 8).to(torch.int8)


def quantize_shared(
    grad_output: Tensor, rank: int, tokens: int, summed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_output [L, O] for g_x and for g_w from one read, INT8, stochastically rounded.

    g_x: row_q int8 [L, O rounded up to 32], row_scale fp32 [L]:
    value ~ row_q * row_scale[:, None] * equal[None, :].
    g_w: col_q int8 [O, K], fold fp32 [K]: value ~ (col_q * equal[:, None] * fold[None, :])^T.
    rank 0: the very integers of row_q, transposed; a unit is 16 rows. rank 8: HLA(8) of each unit
    of 16 rows (``_transform_rows``), whose 8 rows share a scale from the bound |h| <= sum |g| / 4,
    summed over the rows' absmax: up to 2 bits wide, far below what HLA itself leaves out.
    peak fp32 [units] is the largest ``fold`` of each unit. equal fp32 [O]: see ``equal_of``.
    sums fp32 [units / 4, O], empty unless ``summed``: they add up to the sum over grad_output's
    rows, the gradient of a bias. Which rows each takes, and in which order, is a provider's choice.
    """
    rows, cols = grad_output.shape
    equal = equal_of(grad_output)
    values = grad_output.float() * (2.0**-MOST_LIFT / equal)  # exact: powers of two
    absmax = values.abs().amax(1) if cols else values.new_zeros(rows)
    row_scale, reciprocal = shared_scale_of(absmax)
    row_q = quantize_fixed(values, reciprocal)
    contracted, unit = contracted_rows(rows, rank, tokens), unit_rows(rank)
    if rank == 0:
        fold, col_q = row_scale, row_q
    else:
        fold, col_q = _half_rows(values, absmax, rank, tokens)
    fold = torch.nn.functional.pad(fold, (0, contracted - fold.shape[0]))
    col_q = _pad_rows(col_q, contracted).t().contiguous()
    peak = fold.reshape(contracted // unit, unit).amax(1)
    row_q = torch.nn.functional.pad(row_q, (0, round_up(cols, CONTRACT_ALIGN) - cols))
    sums = _sums(grad_output.float(), sum_rows(peak.shape[0]) if summed else 0)
    return row_q, row_scale, col_q, fold, peak, equal, sums


def _sums(values: Tensor, count: int) -> Tensor:
    """``values`` [L, O] added up to [count, O]."""
    rows, cols = values.shape
    each = -(-rows // count) if count else 0
    return _pad_rows(values[: each * count], each * count).reshape(count, each, cols).sum(1)


def _half_rows(values: Tensor, absmax: Tensor, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(fold, integers) of the kept rows of every unit, which share the unit's scale."""
    kept = _transform_rows(values, rank, tokens)
    bound = _transform_rows(absmax.unsqueeze(1), HADAMARD_ORDER, tokens)[::HADAMARD_ORDER, 0]
    scale, reciprocal = (t.repeat_interleave(rank) for t in shared_scale_of(bound))
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


def compress_int8(x: Tensor, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Storage of x [R, C] in INT8: symmetric, one bf16 scale per column and tile of 8 units.

    rank 0: the rows themselves (a tile is 128 of them); rank 8: HLA(8) of units of 16 rows (a tile
    is 64 kept rows). Returns q int8 [C, K] (tail zero) and scale bf16 [C, tiles], rounded outward.
    A granule that holds inf or NaN gets scale NaN and zeros.
    """
    values = x.float() if rank == 0 else _transform_rows(x.float(), rank, tokens)
    contracted = contracted_rows(x.shape[0], rank, tokens)
    tile = unit_rows(rank) * UNITS_PER_TILE
    tiles = (contracted + tile - 1) // tile
    values = _pad_rows(values, tiles * tile).t().reshape(x.shape[1], tiles, tile)
    absmax = values.abs().amax(2)
    usable = (absmax >= TINY) & (absmax < float("inf"))
    qmax = torch.tensor(127.0, device=x.device)
    outward = _bf16_outward(torch.where(usable, absmax / qmax, 0.0), up=True)
    scale = torch.where(usable | (absmax < TINY), outward, float("nan"))
    reciprocal = torch.where(usable, 1.0 / torch.where(usable, scale.float(), 1.0), 0.0)
    q = torch.where(usable.unsqueeze(2), values * reciprocal.unsqueeze(2), 0.0).round()
    q = q.clamp(-127, 127).to(torch.int8).reshape(x.shape[1], tiles * tile)
    return q[:, :contracted].contiguous(), scale


def _column_grid(magnitude: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of columns whose tiles reach ``magnitude`` [C, tiles], after the fold.

    A bound, not the absmax itself, so that nothing but scales has to be read for it.
    """
    tiles = magnitude.shape[1]
    padded = torch.nn.functional.pad(peak, (0, tiles * UNITS_PER_TILE - peak.shape[0]))
    highest = padded.reshape(tiles, UNITS_PER_TILE).amax(1)
    bound = magnitude * highest
    return scale_of(bound.amax(1) if tiles else bound.new_zeros(bound.shape[0]), 8)


def _each(per_tile: Tensor, tile: int, contracted: int) -> Tensor:
    return per_tile.repeat_interleave(tile, 1)[:, :contracted]


def _folded(t: Tensor, fold: Tensor, reciprocal: Tensor) -> Tensor:
    """``t`` [C, K] times ``fold`` [K], the product rounded once: to an integer."""
    product = torch.where((reciprocal == 0).unsqueeze(1), 0.0, t.double() * fold.double())
    return product.round().clamp(-127, 127).to(torch.int8)


def rescale_int4(
    packed: Tensor, scale: Tensor, minimum: Tensor, fold: Tensor, peak: Tensor
) -> tuple[Tensor, Tensor]:
    """Packed INT4 times ``fold`` along K on one symmetric INT8 grid per column.

    packed, scale, minimum: as ``compress_int4`` returns them. fold fp32 [K], peak fp32 [K / 16]: as
    ``quantize_shared`` returns them. Returns q int8 [C, K] and scale fp32 [C]:
    x * fold ~ q * scale.
    """
    cols, half = packed.shape
    step, low = scale.float(), minimum.float()
    top = 15.0 * step + low
    # not torch.maximum of the magnitudes' bits: NaN must win, as it does here
    column_scale, reciprocal = _column_grid(torch.maximum(low.abs(), top.abs()), peak)
    slope, start = step * reciprocal.unsqueeze(1), low * reciprocal.unsqueeze(1)
    q4 = torch.stack((packed & 15, packed >> 4), 2).reshape(cols, half * 2).float()
    slope, start = (_each(t, INT4_GROUP, half * 2) for t in (slope, start))
    return _folded(q4 * slope + start, fold, reciprocal), column_scale


def rescale_int8(
    stored: Tensor, scale: Tensor, fold: Tensor, peak: Tensor
) -> tuple[Tensor, Tensor]:
    """INT8 storage times ``fold`` along K on one symmetric INT8 grid per column.

    stored, scale: as ``compress_int8`` returns them, of the same rank and tokens as the call of
    ``quantize_shared`` that returned fold fp32 [K] and peak fp32 [units]. Returns q int8 [C, K] and
    scale fp32 [C]: x * fold ~ q * scale.
    """
    contracted = stored.shape[1]
    step = scale.float()
    column_scale, reciprocal = _column_grid(step * 127.0, peak)
    tile = contracted // max(1, peak.shape[0]) * UNITS_PER_TILE
    slope = _each(step * reciprocal.unsqueeze(1), tile, contracted)
    return _folded(stored.float() * slope, fold, reciprocal), column_scale
