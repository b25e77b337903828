"""What every ``hot::`` operator computes, readably, in PyTorch. Providers are tested against this.

Integers and scales here are the definition, bit for bit: each float operation is a single IEEE fp32
operation in the order written (no fused multiply-add). The one exception is the float epilogue of
``scaled_int_mm``, which providers may round differently within a stated budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.ops import (
    CONTRACT_ALIGN,
    HADAMARD_ORDER,
    INT4_GROUP,
    contracted_rows,
    round_up,
)

TINY = 2.0**-116
"""A granule whose absmax is below this quantises to zeros, so that no reciprocal overflows."""
_ROW_HASH, _COL_HASH, _MIX_HASH = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_MASK32 = 0xFFFFFFFF


def low_pass_order() -> list[int]:
    """Indices of H16 by LP_L1: |i|+|j| of the 4x4 tile's sequencies, ties by max, then by index.

    Source: LBP-WHT's criterion as the paper's supplementary B states it. H16 = H4 (x) H4.
    """
    sequency = (0, 3, 1, 2)  # sign changes of the rows of Sylvester's H4
    pairs = [(sequency[n // 4], sequency[n % 4], n) for n in range(HADAMARD_ORDER)]
    return [n for i, j, n in sorted(pairs, key=lambda p: (p[0] + p[1], max(p[0], p[1]), p[2]))]


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, which must have 16 entries.

    Butterflies at distance 1, 2, 4, 8 in this order; a sum or difference each; then times 1/4.
    """
    shape = x.shape
    for distance in (1, 2, 4, 8):
        pairs = x.reshape(*shape[:-1], HADAMARD_ORDER // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(shape)
    return x * 0.25


def scale_of(absmax: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of granules with this absmax: both 0 for an all-zero granule.

    A granule that holds inf or NaN gets scale NaN and reciprocal 0: its integers are 0 and whatever
    is computed from it is NaN, as exact training would make it non-finite.
    """
    qmax = torch.tensor(float(2 ** (bits - 1) - 1), device=absmax.device)
    usable = (absmax >= TINY) & (absmax < float("inf"))
    safe = torch.where(usable, absmax, 1.0)
    zero, nan = torch.zeros_like(absmax), torch.full_like(absmax, float("nan"))
    scale = torch.where(usable, safe / qmax, torch.where(absmax < TINY, zero, nan))
    return scale, torch.where(usable, qmax / safe, zero)


def _dither(t: Tensor) -> Tensor:
    """Pseudo-random numbers in [1, 2) of 11 bits from the bits of ``t`` and their place in it.

    NITI's pseudo-stochastic rounding takes the low mantissa bits as they are; those vanish for
    power-of-two scales and bf16-born values (docs/adr/0002), so the bits are hashed with the place.
    """
    rows = torch.arange(t.shape[0], device=t.device, dtype=torch.int64).unsqueeze(1)
    cols = torch.arange(t.shape[1], device=t.device, dtype=torch.int64)
    place = (rows * _ROW_HASH + cols * _COL_HASH) & _MASK32
    bits = t.contiguous().view(torch.int32).to(torch.int64) & _MASK32
    mixed = (bits ^ place) * _MIX_HASH & _MASK32
    return 1.0 + (mixed >> 21).to(torch.float32) / 2048.0


def quantize(values: Tensor, reciprocal: Tensor, bits: int, stochastic: bool) -> Tensor:
    """INT8 tensor of ``values`` (2-D fp32) times ``reciprocal`` (broadcast), rounded and clamped.

    nearest: ties to even. stochastic: floor(fl(t + u)) - 1 with u in [1, 2) from ``_dither``.
    """
    qmax = 2 ** (bits - 1) - 1
    t = torch.where(reciprocal == 0, torch.zeros_like(values), values * reciprocal)
    rounded = torch.floor(t + _dither(t)) - 1.0 if stochastic else torch.round(t)
    return rounded.clamp(-qmax, qmax).to(torch.int8)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _absmax(x: Tensor, dim: int, each: bool) -> Tensor:
    """absmax of ``x`` along ``dim`` (``each``), or of all of it repeated to the same shape."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[1 - dim])
    per = x.abs().amax(dim)
    return per if each else per.amax().expand_as(per).contiguous()


def pack_int4(q: Tensor) -> Tensor:
    """INT4 values in int8 [R, K], K even -> uint8 [R, K / 2], entry 2k in the low nibble of byte k.

    Two's complement, the layout of INT4 tensor cores' operands (docs/adr/0008).
    """
    low, high = q[:, 0::2].to(torch.uint8) & 15, q[:, 1::2].to(torch.uint8) & 15
    return low | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Inverse of ``pack_int4``."""
    nibbles = torch.stack((packed & 15, packed >> 4), 2).flatten(1).to(torch.int8)
    return nibbles - 16 * (nibbles > 7)


def quantize_rows(
    x: Tensor, bits: int, per_row: bool, stochastic: bool, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """HQ along the columns (paper, section 4.1): HT16 of each row, then symmetric quantisation.

    x: [R, C] float. Returns q int8 [R, C rounded up to 32] and scale fp32 [R] (one value repeated
    when not ``per_row``). q * scale[:, None] approximates the transformed rows. ``packed`` (4 bits
    only): q is packed two values a byte, see ``pack_int4``.
    """
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, round_up(cols, CONTRACT_ALIGN) - cols))
    blocks = padded.reshape(rows, padded.shape[1] // HADAMARD_ORDER, HADAMARD_ORDER)
    values = hadamard(blocks).reshape(padded.shape)
    scale, reciprocal = scale_of(_absmax(values, 1, per_row), bits)
    q = quantize(values, reciprocal.unsqueeze(1), bits, stochastic)
    return pack_int4(q) if packed else q, scale


def _transform_rows(x: Tensor, rank: int, tokens: int) -> Tensor:
    """HLA(``rank``) over groups of 16 rows: row ``s * tokens + t`` is sample s, token t.

    Group (g, t) holds token t of samples 16 g ... 16 g + 15; its k-th kept coefficient (in the
    matrix's own order, so that rank 16 matches ``quantize_rows``) becomes row
    (g * tokens + t) * rank + k. tokens = 1 groups consecutive rows.
    """
    samples = x.shape[0] // tokens
    groups = (samples + HADAMARD_ORDER - 1) // HADAMARD_ORDER
    x = _pad_rows(x, groups * HADAMARD_ORDER * tokens)
    x = x.reshape(groups, HADAMARD_ORDER, tokens, x.shape[1]).permute(0, 2, 3, 1)
    kept = hadamard(x)[..., sorted(low_pass_order()[:rank])]
    return kept.permute(0, 1, 3, 2).reshape(groups * tokens * rank, x.shape[2])


def quantize_columns(
    x: Tensor,
    rank: int,
    tokens: int,
    bits: int,
    per_column: bool,
    stochastic: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Transform along the rows, quantise per column, write transposed (K contiguous).

    x: [R, C] float with R a multiple of ``tokens``. rank 0: no transform; 1..16: HLA(rank) in
    groups of 16 rows, see ``_transform_rows`` (16 is the full transform). Returns q int8 [C, K]
    with K = ``contracted_rows(R, rank, tokens)`` (tail zero), scale fp32 [C] and total fp32 [C] =
    scale * (sum of q over K), the rank-1 companion of a zero point on the other operand. ``packed``
    as in ``quantize_rows``.
    """
    rows = x.shape[0]
    values = x.float() if rank == 0 else _transform_rows(x.float(), rank, tokens)
    scale, reciprocal = scale_of(_absmax(values, 0, per_column), bits)
    values = _pad_rows(values, contracted_rows(rows, rank, tokens)).t().contiguous()
    q = quantize(values, reciprocal.unsqueeze(1), bits, stochastic)
    total = scale * q.sum(1, dtype=torch.int32).float()
    return pack_int4(q) if packed else q, scale, total


def quantize_grad(
    grad_output: Tensor,
    row_bits: int,
    per_row: bool,
    rank: int,
    tokens: int,
    per_column: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Both quantised forms of grad_output [L, O]: for g_x (rows) and for g_w (columns, INT8).

    ``quantize_rows`` and ``quantize_columns`` with stochastic rounding, one operator so that a
    provider can share the reading of grad_output. ``packed``: the rows' INT4 values.
    """
    return (
        *quantize_rows(grad_output, row_bits, per_row, True, packed),
        *quantize_columns(grad_output, rank, tokens, 8, per_column, True),
    )


def _bf16_outward(x: Tensor, up: bool) -> Tensor:
    """fp32 ``x`` rounded to bf16 towards +inf (``up``) or -inf; NaN stays NaN."""
    bits = x.contiguous().view(torch.int32)
    grow = (x > 0) if up else (x < 0)
    away = (grow & ((bits & 0xFFFF) != 0)).to(torch.int32) * 0x10000
    rounded = ((bits & ~0xFFFF) + away).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded).to(torch.bfloat16)


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
    minimum = _bf16_outward(low, up=False)
    width = high - minimum.float()
    finite = torch.isfinite(width) & torch.isfinite(minimum.float())
    usable = finite & (width >= TINY)
    fifteen = torch.tensor(15.0, device=x.device)
    zero = torch.zeros_like(width)
    scale = _bf16_outward(torch.where(usable, width / fifteen, zero), up=True)
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


def scaled_int_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    row_term: Tensor | None,
    col_term: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Integer product with dequantising epilogue: a [M, K] int8, b [N, K] int8 -> [M, N].

    out = (a b^T) * a_scale[:, None] * b_scale[None, :] (+ row_term[:, None] * col_term[None, :]).
    The integer sum is exact for any K (int64 here; providers split K before int32 can overflow).
    Both operands may be INT4 packed as in ``pack_int4`` (uint8 [M, K / 2] and [N, K / 2]).
    """
    if a.dtype == b.dtype == torch.uint8:
        a, b = unpack_int4(a), unpack_int4(b)
    product = (a.double() @ b.double().t()).to(torch.float32)
    out = product * a_scale.unsqueeze(1) * b_scale
    if row_term is not None and col_term is not None:
        out = out + row_term.unsqueeze(1) * col_term
    return out.to(out_dtype)
