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
    UNITS_PER_TILE,
    contracted_rows,
    unit_rows,
)


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
    qmax = absmax.new_full((), 127.0, dtype=torch.float32)
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
