"""The arithmetic that definitions share; each float operation is one IEEE fp32 operation."""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

TINY = 2.0**-116
"""A granule whose absmax is below this quantises to zeros, so that no reciprocal overflows."""
ROW_HASH, COL_HASH, MIX_HASH = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
MASK32 = 0xFFFFFFFF


def low_pass_order() -> list[int]:
    """Indices of H16 by LP_L1: |i|+|j| of the 4x4 tile's sequencies, ties by max, then by index.

    Source: LBP-WHT's criterion as the paper's supplementary B states it. H16 = H4 (x) H4.
    """
    sequency = (0, 3, 1, 2)  # sign changes of the rows of Sylvester's H4
    pairs = [(sequency[n // 4], sequency[n % 4], n) for n in range(HADAMARD_ORDER)]
    return [n for i, j, n in sorted(pairs, key=lambda p: (p[0] + p[1], max(p[0], p[1]), p[2]))]


def low_pass_places(rank: int) -> list[int]:
    """The first ``rank`` of them, in the matrix's own order."""
    return sorted(low_pass_order()[:rank])


def low_pass(x: Tensor, rank: int) -> Tensor:
    """[..., rank] of transformed [..., 16]: by slices, since a list as index is copied to a GPU."""
    return torch.stack([x[..., place] for place in low_pass_places(rank)], -1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, which must have 16 entries."""
    return butterflies(x) * 0.25


def butterflies(x: Tensor) -> Tensor:
    """The transform unscaled: a sum or difference each, at distance 1, 2, 4, 8 in this order."""
    shape = x.shape
    for distance in (1, 2, 4, 8):
        pairs = x.reshape(*shape[:-1], HADAMARD_ORDER // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
    return x


def scale_of(absmax: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of granules with this absmax: both 0 for an all-zero granule.

    A granule that holds inf or NaN gets scale NaN and reciprocal 0: its integers are 0 and whatever
    is computed from it is NaN, as exact training would make it non-finite.
    """
    qmax = absmax.new_full((), 2 ** (bits - 1) - 1, dtype=torch.float32)
    usable = (absmax >= TINY) & (absmax < float("inf"))
    safe = torch.where(usable, absmax, 1.0)
    zero, nan = torch.zeros_like(absmax), torch.full_like(absmax, float("nan"))
    scale = torch.where(usable, safe / qmax, torch.where(absmax < TINY, zero, nan))
    return scale, torch.where(usable, qmax / safe, zero)


def dither(t: Tensor) -> Tensor:
    """Pseudo-random numbers in [1, 2) of 11 bits from the bits of ``t`` and their place in it.

    NITI's pseudo-stochastic rounding takes the low mantissa bits as they are; those vanish for
    power-of-two scales and bf16-born values (docs/adr/0002), so the bits are hashed with the place.
    """
    rows = torch.arange(t.shape[0], device=t.device, dtype=torch.int64).unsqueeze(1)
    cols = torch.arange(t.shape[1], device=t.device, dtype=torch.int64)
    place = (rows * ROW_HASH + cols * COL_HASH) & MASK32
    bits = t.contiguous().view(torch.int32).to(torch.int64) & MASK32
    mixed = (bits ^ place) * MIX_HASH & MASK32
    return 1.0 + (mixed >> 21).to(torch.float32) / 2048.0


def quantize(values: Tensor, reciprocal: Tensor, bits: int, stochastic: bool) -> Tensor:
    """INT8 tensor of ``values`` (2-D fp32) times ``reciprocal`` (broadcast), rounded and clamped.

    nearest: ties to even. stochastic: floor(fl(t + u)) - 1 with u in [1, 2) from ``dither``.
    """
    qmax = 2 ** (bits - 1) - 1
    t = torch.where(reciprocal == 0, torch.zeros_like(values), values * reciprocal)
    rounded = torch.floor(t + dither(t)) - 1.0 if stochastic else torch.round(t)
    return rounded.clamp(-qmax, qmax).to(torch.int8)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """``x`` [R, C] with rows of zeros up to ``rows``."""
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def absmax_of(x: Tensor, dim: int, each: bool) -> Tensor:
    """absmax of ``x`` along ``dim`` (``each``), or of all of it repeated to the same shape."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[1 - dim])
    per = x.abs().amax(dim)
    return per if each else per.amax().expand_as(per).contiguous()


def bf16_outward(x: Tensor, up: bool) -> Tensor:
    """fp32 ``x`` rounded to bf16 towards +inf (``up``) or -inf; NaN stays NaN."""
    bits = x.contiguous().view(torch.int32)
    grow = (x > 0) if up else (x < 0)
    away = (grow & ((bits & 0xFFFF) != 0)).to(torch.int32) * 0x10000
    rounded = ((bits & ~0xFFFF) + away).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded).to(torch.bfloat16)


def transform_rows(x: Tensor, rank: int, tokens: int) -> Tensor:
    """HLA(``rank``) over groups of 16 rows: row ``s * tokens + t`` is sample s, token t.

    Group (g, t) holds token t of samples 16 g ... 16 g + 15; its k-th kept coefficient (in the
    matrix's own order, so that rank 16 matches ``quantize_rows``) becomes row
    (g * tokens + t) * rank + k. tokens = 1 groups consecutive rows.
    """
    samples = x.shape[0] // tokens
    groups = (samples + HADAMARD_ORDER - 1) // HADAMARD_ORDER
    x = pad_rows(x, groups * HADAMARD_ORDER * tokens)
    x = x.reshape(groups, HADAMARD_ORDER, tokens, x.shape[1]).permute(0, 2, 3, 1)
    kept = low_pass(hadamard(x), rank)
    return kept.permute(0, 1, 3, 2).reshape(groups * tokens * rank, x.shape[2])


def pack_int4(q: Tensor) -> Tensor:
    """INT4 values in int8 [R, K], K even -> uint8 [R, K / 2], entry 2k in the low nibble of byte k.

    Two's complement, the layout of INT4 tensor cores' operands (docs/adr/0008).
    """
    low, high = q[:, 0::2].to(torch.uint8) & 15, q[:, 1::2].to(torch.uint8) & 15
    return low | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Inverse of ``pack_int4``."""
    nibbles = torch.stack((packed & 15, packed >> 4), 2).flatten(1).to(torch.int8)
    return (nibbles - 16 * (nibbles > 7)).to(torch.int8)
