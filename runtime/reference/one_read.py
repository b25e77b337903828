"""Definition of one quantisation of grad_output that serves both products.

g_y is read once. Its rows are Hadamard-transformed along the outputs, get a scale each, and the
same INT8 integers feed g_x, row by row, and g_w, transposed:

    g_x = (g_y H) (H W)            g_w = H ((g_y H)^T x)

A row's scale lies on g_w's contracted dimension: it is folded into x when x is brought from its
storage onto its columns' grids (``rescale_int8``). What g_w is left with, H over
16 of its O x I values, is the epilogue of its product (``hadamard_int_mm``). See docs/adr/0005.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import (
    COL_HASH,
    MASK32,
    MIX_HASH,
    ROW_HASH,
    hadamard,
    pad_rows,
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

ONE_READ_TINY = 2.0**-100
"""A row whose largest transformed magnitude is below this quantises to zeros."""
EQUAL_PARTS = 24
"""Thirds, halves, quarters and the parts of grouped queries, keys and values are some of these."""
SAMPLED_ROWS = 512
MOST_LIFT = 6
MOST_HALVINGS = 6
LANE_HASH = 0x27D4EB2F
"""Of a place within 16, beside ROW_HASH of its row and COL_HASH of the 16."""
_MAGIC_BITS = 0x4B400000  # of the float 1.5 * 2^23, to which providers add values to round them


def one_read_scale_of(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal) of rows whose largest magnitude is ``absmax``.

    reciprocal: gives 256 times the quotient, in fixed point.
    """
    usable = (absmax >= ONE_READ_TINY) & (absmax < float("inf"))
    safe = torch.where(usable, absmax, 1.0)
    zero, nan = torch.zeros_like(absmax), torch.full_like(absmax, float("nan"))
    qmax, fixed = (absmax.new_full((), v, dtype=torch.float32) for v in (127.0, 32512.0))
    scale = torch.where(usable, safe / qmax, torch.where(absmax < ONE_READ_TINY, zero, nan))
    return scale, torch.where(usable, fixed / safe, zero)


def _sampled_exponents(grad_output: Tensor) -> Tensor:
    """Exponents of the absmax of grad_output's parts, int32 [``EQUAL_PARTS``].

    Over ``SAMPLED_ROWS`` rows, of which every stretch of grad_output has one, at no fixed distance.
    The parts are equal ones, of whole blocks of 16 columns. Of NaN and inf: of the largest finite.
    """
    rows, cols = grad_output.shape
    count, device = min(rows, SAMPLED_ROWS), grad_output.device
    of_part = torch.zeros(EQUAL_PARTS, dtype=torch.int32, device=device)
    if count == 0 or cols == 0:
        return of_part
    n = torch.arange(count, device=device, dtype=torch.int64)
    start, end = n * rows // count, (n + 1) * rows // count
    picked = start + ((n * MIX_HASH & MASK32) >> 8) % (end - start)
    absmax = grad_output[picked].float().abs().amax(0)
    exponent = ((absmax.view(torch.int32) & 0x7FFFFFFF) >> 23).clamp(max=254)
    return of_part.scatter_reduce(
        0, _part_of_blocks(cols)[:cols].to(of_part.device), exponent, "amax"
    )


def _part_of_blocks(cols: int) -> Tensor:
    """The part that each column is in, int64 [``cols`` rounded up to 16]."""
    blocks = round_up(cols, HADAMARD_ORDER) // HADAMARD_ORDER
    return (torch.arange(blocks, device="cpu") * EQUAL_PARTS // max(1, blocks)).repeat_interleave(
        HADAMARD_ORDER
    )


def equal_of(exponents: Tensor, cols: int) -> Tensor:
    """Powers of two in [2^-6, 1], fp32 [``cols`` rounded up to 16]: how large each part is.

    Relative to the largest, and twice as large as that says: what a sample missed costs little.
    """
    lift = (exponents.max() - exponents - 1).clamp(0, MOST_LIFT)
    lift = torch.where(exponents == 0, 0, lift)  # nothing was seen
    return torch.exp2(-lift.float())[_part_of_blocks(cols).to(exponents.device)]


def quantize_fixed(values: Tensor, factor: Tensor, halvings: Tensor | int = 0) -> Tensor:
    """INT8 of ``values`` [R, C] times ``factor`` [R] / 256, stochastically rounded.

    The product, exact as a fused multiply-add has it, is rounded to 8 fractional bits; 8 bits
    hashed from it and its place are added and the fraction is dropped: unbiased, exact on the grid,
    and never beyond 127 in magnitude. ``halvings`` [R]: of that times 2^-halvings, which adds as
    many bits of the hash more.
    """
    product = values.double() * factor.double().unsqueeze(1)
    return round_fixed(torch.where(factor.unsqueeze(1) == 0, 0.0, product), halvings)


def round_fixed(product: Tensor, halvings: Tensor | int = 0) -> Tensor:
    """INT8 of ``product`` [R, C] fp64 / 256: see ``quantize_fixed``."""
    fixed = product.round().to(torch.int64)
    rows = torch.arange(product.shape[0], device=product.device, dtype=torch.int64).unsqueeze(1)
    cols = torch.arange(product.shape[1], device=product.device, dtype=torch.int64)
    lane = cols % HADAMARD_ORDER * LANE_HASH
    place = ((rows * ROW_HASH) ^ (cols // HADAMARD_ORDER * COL_HASH) ^ lane) & MASK32
    hashed = (fixed + _MAGIC_BITS ^ place) * MIX_HASH & MASK32
    more = halvings.unsqueeze(1) if isinstance(halvings, Tensor) else halvings
    return (fixed + (hashed >> 24 - more) >> 8 + more).to(torch.int8)


def halvings_of(exponents: Tensor, absmax: Tensor) -> Tensor:
    """By how many bits g_w's integers of rows are shorter, int64 [L], from the rows' ``absmax``.

    A row's scale is shared between g_y and x. All of it in x would leave x of rows with little
    gradient no bits, while g_y's integers of those rows had all of theirs; so each takes half of
    what the row is smaller than the largest (of the sample, whose values are not transformed: that
    makes one spike a quarter as large).
    """
    own = (absmax.view(torch.int32) >> 23).clamp(max=254)
    return ((exponents.max() - own - 2) >> 1).clamp(0, MOST_HALVINGS).long()


def quantize_one_read(
    grad_output: Tensor,
    rank: int,
    tokens: int,
    summed: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_output [L, O] for g_x and for g_w from one read, INT8, stochastically rounded.

    Every row is transformed by HT16 along the outputs, padded with zeros to whole blocks of 16. Of
    bf16 and fp16 the sums are rounded to bf16: 0.2 % of a value; a step is 0.8 % of the largest.
    g_x: row_q int8 [L, O rounded up to 32], row_scale fp32 [L]:
    transformed value ~ row_q * row_scale[:, None] * equal[None, :].
    g_w: col_q int8 [O rounded up to 16, K], fold fp32 [K]:
    transformed value ~ (col_q * equal[:, None] * fold[None, :])^T.
    equal fp32 [O rounded up to 16]: ones, or, if grad_output is ``fused`` (put together from
    several tensors' gradients, as a fused qkv's is), ``equal_of`` its parts: k's may be a hundredth
    of v's, and one scale a row would leave them no bits.
    rank 0: the very integers of row_q, transposed, those of rows with little gradient rounded to
    fewer bits (``halvings_of``); a unit is 16 rows. rank 8: HLA(8) of each unit
    of 16 rows (``transform_rows``), whose 8 rows share a scale from the bound |h| <= sum |g| / 4,
    summed over the rows' absmax: up to 2 bits wide, far below what HLA itself leaves out.
    peak fp32 [units] is the largest ``fold`` of each unit.
    sums fp32 [units / 4, O], empty unless ``summed``: they add up to the sum over grad_output's
    rows, the gradient of a bias. Which rows each takes, and in which order, is a provider's choice.
    """
    rows, cols = grad_output.shape
    exponents = _sampled_exponents(grad_output)
    equal = equal_of(exponents if fused else torch.zeros_like(exponents), cols)
    values = _transformed(grad_output) / equal
    absmax = values.abs().amax(1) if cols else values.new_zeros(rows)
    row_scale, reciprocal = one_read_scale_of(absmax)
    row_q = quantize_fixed(values, reciprocal)
    contracted, unit = contracted_rows(rows, rank, tokens), unit_rows(rank)
    if rank == 0:
        halvings = halvings_of(exponents, absmax)
        fold, col_q = row_scale * 2**halvings, quantize_fixed(values, reciprocal, halvings)
    else:
        fold, col_q = _half_rows(values, absmax, rank, tokens)
    fold = torch.nn.functional.pad(fold, (0, contracted - fold.shape[0]))
    col_q = pad_rows(col_q, contracted).t().contiguous()
    peak = fold.reshape(contracted // unit, unit).amax(1)
    row_q = torch.nn.functional.pad(row_q, (0, round_up(cols, CONTRACT_ALIGN) - values.shape[1]))
    sums = _sums(grad_output.float(), sum_rows(peak.shape[0]) if summed else 0)
    return row_q, row_scale, col_q, fold, peak, equal, sums


def _transformed(grad_output: Tensor) -> Tensor:
    """Rows transformed in blocks of 16 columns, fp32 [L, O rounded up to 16]."""
    rows, cols = grad_output.shape
    dtype = torch.float32 if grad_output.dtype == torch.float32 else torch.bfloat16
    values = torch.nn.functional.pad(
        grad_output.to(dtype), (0, round_up(cols, HADAMARD_ORDER) - cols)
    )
    blocks = values.reshape(rows, values.shape[1] // HADAMARD_ORDER, HADAMARD_ORDER)
    return hadamard(blocks).reshape(values.shape).float()


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
