"""Definition of how x is stored for the backward, and of what brings it back for g_w."""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import (
    TINY,
    bf16_outward,
    pad_rows,
    scale_of,
    transform_rows,
)
from hot_compile.runtime.reference.one_read import round_fixed
from hot_compile.runtime.reference.sizes import (
    CONTRACT_ALIGN,
    INT4_GROUP,
    UNITS_PER_TILE,
    contracted_rows,
    round_up,
    unit_rows,
)


def compress_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed INT4 storage of x [R, C]: min-max groups of 128 rows x 1 column, 4.25 bits a value.

    Returns packed uint8 [C, round_up(R, 32) / 2] (row 2k in the low nibble of byte k, row 2k+1 in
    the high one; padding 0), scale and minimum bf16 [C, groups], rounded outward so that the grid
    covers the group. value ~ q * scale + minimum with q in 0..15. A group that holds inf or NaN
    gets minimum NaN and q = 0.
    """
    rows, cols = x.shape
    groups = (rows + INT4_GROUP - 1) // INT4_GROUP
    full = x.float().t().contiguous()
    if rows < groups * INT4_GROUP:  # repeat the last row: it changes no minimum and no maximum
        tail = full[:, -1:].expand(cols, groups * INT4_GROUP - rows)
        full = torch.cat((full, tail), 1)
    full = full.reshape(cols, groups, INT4_GROUP)
    low, high = full.amin(2), full.amax(2)
    minimum = bf16_outward(low, up=False)
    width = high - minimum.float()
    finite = torch.isfinite(width) & torch.isfinite(minimum.float())
    usable = finite & (width >= TINY)
    fifteen = torch.tensor(15.0, device=x.device)
    zero = torch.zeros_like(width)
    scale = bf16_outward(torch.where(usable, width / fifteen, zero), up=True)
    minimum = torch.where(finite, minimum, float("nan"))
    reciprocal = torch.where(usable, 1.0 / torch.where(usable, scale.float(), 1.0), zero)
    centred = torch.where(usable.unsqueeze(2), full - minimum.float().unsqueeze(2), 0.0)
    q = centred.double() * reciprocal.double().unsqueeze(2)  # rounded once, to an integer
    q = torch.round(q).clamp(0, 15).to(torch.uint8)
    q = q.reshape(cols, groups * INT4_GROUP)[:, :rows]
    q = torch.nn.functional.pad(q, (0, round_up(rows, CONTRACT_ALIGN) - rows))
    return q[:, 0::2] | (q[:, 1::2] << 4), scale, minimum


def expand_int4(packed: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed INT4 on one asymmetric INT8 grid per column, ready for the integer product.

    Inverse of ``compress_int4`` up to the rounding onto the column's grid: q int8 [C, K], scale and
    zero fp32 [C], value ~ q * scale + zero. The zero point leaves the product as a rank-1 term.
    """
    cols, half = packed.shape
    groups = scale.shape[1]
    step, low = scale.float(), minimum.float()
    high = 15.0 * step + low
    if groups == 0:
        empty = torch.zeros(cols, device=packed.device)
        return packed.new_empty((cols, 0), dtype=torch.int8), empty, empty.clone()
    col_low, col_high = low.amin(1), high.amax(1)
    zero = (col_low + col_high) * 0.5
    width = col_high - col_low
    usable = (width >= TINY) & (width < float("inf"))
    grid = torch.tensor(254.0, device=packed.device)
    safe = torch.where(usable, width, 1.0)
    nothing, nan = torch.zeros_like(width), torch.full_like(width, float("nan"))
    col_scale = torch.where(usable, safe / grid, torch.where(width < TINY, nothing, nan))
    reciprocal = torch.where(usable, grid / safe, nothing)
    levels = torch.arange(16, device=packed.device, dtype=torch.float32)
    table = (levels * step.unsqueeze(2) + low.unsqueeze(2)) - zero[:, None, None]
    usable = usable[:, None, None]
    table = torch.where(usable, table * reciprocal[:, None, None], 0.0).round().clamp(-127, 127)
    q4 = torch.stack((packed & 15, packed >> 4), 2).reshape(cols, half * 2).long()
    group = torch.arange(half * 2, device=packed.device) // INT4_GROUP
    q = table[torch.arange(cols, device=packed.device).unsqueeze(1), group, q4]
    return q.to(torch.int8), col_scale, zero


def compress_int8(x: Tensor, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Storage of x [R, C] in INT8: symmetric, one bf16 scale per column and tile of 8 units.

    rank 0: the rows themselves (a tile is 128 of them); rank 8: HLA(8) of units of 16 rows (a tile
    is 64 kept rows). Returns q int8 [C, K] (tail zero) and scale bf16 [C, tiles], rounded outward.
    A granule that holds inf or NaN gets scale NaN and zeros.
    """
    values = x.float() if rank == 0 else transform_rows(x.float(), rank, tokens)
    contracted = contracted_rows(x.shape[0], rank, tokens)
    tile = unit_rows(rank) * UNITS_PER_TILE
    tiles = (contracted + tile - 1) // tile
    values = pad_rows(values, tiles * tile).t().reshape(x.shape[1], tiles, tile)
    absmax = values.abs().amax(2)
    usable = (absmax >= TINY) & (absmax < float("inf"))
    qmax = torch.tensor(127.0, device=x.device)
    outward = bf16_outward(torch.where(usable, absmax / qmax, 0.0), up=True)
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
    """``t`` [C, K] times ``fold`` [K], rounded stochastically, as ``quantize_fixed`` does.

    Rows of little gradient have small folds, and there are many of them: rounded to nearest they
    would be dropped, all of them, in every step.
    """
    product = t.double() * fold.double() * 256.0
    return round_fixed(torch.where((reciprocal == 0).unsqueeze(1), 0.0, product))


def rescale_int4(
    packed: Tensor, scale: Tensor, minimum: Tensor, fold: Tensor, peak: Tensor
) -> tuple[Tensor, Tensor]:
    """Packed INT4 times ``fold`` along K on one symmetric INT8 grid per column.

    packed, scale, minimum: as ``compress_int4`` returns them. fold fp32 [K], peak fp32 [K / 16]: as
    ``quantize_one_read`` returns them. Returns q int8 [C, K] and scale fp32 [C]:
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
    ``quantize_one_read`` that returned fold fp32 [K] and peak fp32 [units]. Returns q int8 [C, K]
    and scale fp32 [C]: x * fold ~ q * scale.
    """
    contracted = stored.shape[1]
    step = scale.float()
    column_scale, reciprocal = _column_grid(step * 127.0, peak)
    tile = contracted // max(1, peak.shape[0]) * UNITS_PER_TILE
    slope = _each(step * reciprocal.unsqueeze(1), tile, contracted)
    return _folded(stored.float() * slope, fold, reciprocal), column_scale
