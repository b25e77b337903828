"""Definition of the quantisers that bring grad_output into a form for each product."""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import (
    absmax_of,
    hadamard,
    pack_int4,
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
)


def quantize_rows(
    x: Tensor,
    bits: int,
    per_row: bool,
    stochastic: bool,
    packed: bool = False,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HQ along the columns (paper, section 4.1): HT16 of each row, then symmetric quantisation.

    x: [R, C] float. Returns q int8 [R, C rounded up to 32] and scale fp32 [R] (one value repeated
    when not ``per_row``). q * scale[:, None] approximates the transformed rows. ``packed`` (4 bits
    only): q is packed two values a byte, see ``pack_int4``. ``factors`` fp32 [C]: what columns are
    multiplied with before the transform.
    """
    rows, cols = x.shape
    values = x.float() if factors is None else x.float() * factors
    padded = torch.nn.functional.pad(values, (0, round_up(cols, CONTRACT_ALIGN) - cols))
    blocks = padded.reshape(rows, padded.shape[1] // HADAMARD_ORDER, HADAMARD_ORDER)
    values = hadamard(blocks).reshape(padded.shape)
    scale, reciprocal = scale_of(absmax_of(values, 1, per_row), bits)
    q = quantize(values, reciprocal.unsqueeze(1), bits, stochastic)
    return pack_int4(q) if packed else q, scale


def quantize_columns(
    x: Tensor,
    rank: int,
    tokens: int,
    bits: int,
    per_column: bool,
    stochastic: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Transform along the rows, quantise per column, write transposed (K contiguous).

    x: [R, C] float with R a multiple of ``tokens``. rank 0: no transform; 1..16: HLA(rank) in
    groups of 16 rows, see ``transform_rows`` (16 is the full transform). Returns q int8 [C, K]
    with K = ``contracted_rows(R, rank, tokens)`` (tail zero) and scale fp32 [C]. ``packed`` as in
    ``quantize_rows``.
    """
    rows = x.shape[0]
    values = x.float() if rank == 0 else transform_rows(x.float(), rank, tokens)
    scale, reciprocal = scale_of(absmax_of(values, 0, per_column), bits)
    values = pad_rows(values, contracted_rows(rows, rank, tokens)).t().contiguous()
    q = quantize(values, reciprocal.unsqueeze(1), bits, stochastic)
    return pack_int4(q) if packed else q, scale


def quantize_grad(
    grad_output: Tensor,
    row_bits: int,
    per_row: bool,
    rank: int,
    tokens: int,
    per_column: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both quantised forms of grad_output [L, O]: for g_x (rows) and for g_w (columns, INT8).

    ``quantize_rows`` and ``quantize_columns`` with stochastic rounding, one operator so that a
    provider can share the reading of grad_output. ``packed``: the rows' INT4 values.
    """
    return (
        *quantize_rows(grad_output, row_bits, per_row, True, packed),
        *quantize_columns(grad_output, rank, tokens, 8, per_column, True),
    )
