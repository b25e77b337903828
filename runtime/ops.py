"""Schemas and fakes of every ``hot::`` operator. Importing this registers them.

Notation (paper, section 3): a layer is y = x W^T with L rows, I inputs, O outputs.
g_x = g_y W contracts O; g_w = g_y^T x contracts L. Quantised operands are written contiguous
along the contracted dimension, which is what integer tensor cores and VNNI read fastest.

Each operator is *defined* by the function of the same name in ``reference.py`` (convolutions:
``reference_conv.py``); providers (CPU, CUDA) match it bitwise on integers and scales. All operators
are functional, return fresh contiguous tensors, draw no random numbers and read nothing back to the
host. This file imports torch only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HADAMARD_ORDER = 16
"""Order of the block-diagonal Walsh-Hadamard transform (paper, section 4)."""
CONTRACT_ALIGN = 32
"""A contracted dimension is zero-padded to this many elements (16 bytes when packed INT4)."""
INT4_GROUP = 128
"""Rows that share one scale and minimum in packed INT4 storage."""
UNITS_PER_TILE = 8
"""Units of 16 rows that share one scale in INT8 storage, and one bound in ``rescale_int*``."""
UNITS_PER_SUM = 4
"""Units of 16 rows that ``quantize_shared`` adds up, on average, to a row of ``sums``."""
SHARED_RANKS = (0, 8)
"""HLA ranks that ``quantize_shared`` and ``compress_int8`` have kernels for."""

SCHEMAS = {
    "quantize_rows": (
        "(Tensor x, int bits, bool per_row, bool stochastic, bool packed=False)"
        " -> (Tensor q, Tensor scale)"
    ),
    "quantize_columns": (
        "(Tensor x, int rank, SymInt tokens, int bits, bool per_column, bool stochastic,"
        " bool packed=False) -> (Tensor q, Tensor scale, Tensor total)"
    ),
    "quantize_grad": (
        "(Tensor grad_output, int row_bits, bool per_row, int rank, SymInt tokens, bool per_column,"
        " bool packed=False)"
        " -> (Tensor row_q, Tensor row_scale, Tensor col_q, Tensor col_scale, Tensor col_total)"
    ),
    "compress_int4": "(Tensor x) -> (Tensor packed, Tensor scale, Tensor minimum)",
    "expand_int4": (
        "(Tensor packed, Tensor scale, Tensor minimum) -> (Tensor q, Tensor scale, Tensor zero)"
    ),
    "quantize_shared": (
        "(Tensor grad_output, int rank, SymInt tokens, bool summed=False) -> (Tensor row_q,"
        " Tensor row_scale, Tensor col_q, Tensor fold, Tensor peak, Tensor equal, Tensor sums)"
    ),
    "quantize_weight": (
        "(Tensor weight, Tensor equal, bool inputs_first) -> (Tensor q, Tensor scale)"
    ),
    "compress_int8": "(Tensor x, int rank, SymInt tokens) -> (Tensor q, Tensor scale)",
    "rescale_int4": (
        "(Tensor packed, Tensor scale, Tensor minimum, Tensor fold, Tensor peak)"
        " -> (Tensor q, Tensor scale)"
    ),
    "rescale_int8": (
        "(Tensor stored, Tensor scale, Tensor fold, Tensor peak) -> (Tensor q, Tensor scale)"
    ),
    "scaled_int_mm": (
        "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? row_term, Tensor? col_term,"
        " ScalarType out_dtype) -> Tensor"
    ),
    "conv_grad_weight": (
        "(Tensor small, Tensor big, Tensor small_scale, Tensor big_scale, Tensor? small_zero,"
        " Tensor? big_zero, SymInt batch, SymInt[] small_size, SymInt[] big_size, int[] kernel,"
        " int[] stride, int[] padding, int[] dilation, int rank, ScalarType out_dtype) -> Tensor"
    ),
    "conv_grad_input": (
        "(Tensor rows, Tensor weight, Tensor row_scale, Tensor weight_scale, SymInt batch,"
        " SymInt[] small_size, SymInt[] big_size, int[] kernel, int[] stride, int[] padding,"
        " int[] dilation, ScalarType out_dtype) -> Tensor"
    ),
}

_LIBRARY = torch.library.Library("hot", "DEF")
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))


def round_up(n: int, multiple: int) -> int:
    """``n`` rounded up to ``multiple``; both may be symbolic."""
    return (n + multiple - 1) // multiple * multiple


def contracted_rows(rows: int, rank: int, tokens: int) -> int:
    """Length K of the contracted dimension that ``quantize_columns`` writes for ``rows`` rows.

    rank 0 (no transform): the rows themselves. Otherwise ``rank`` of every 16 rows of a group;
    groups take the same token of 16 samples when rows = samples x ``tokens``. Padded to 32.
    """
    if rank == 0:
        return round_up(rows, CONTRACT_ALIGN)
    samples = rows // tokens
    blocks = (samples + HADAMARD_ORDER - 1) // HADAMARD_ORDER * tokens
    return round_up(rank * blocks, CONTRACT_ALIGN)


def _quantised(like: Tensor, rows: int, contracted: int, packed: bool) -> Tensor:
    """An operand of the integer product: int8, or INT4 with two values a byte."""
    if packed:
        return like.new_empty((rows, contracted // 2), dtype=torch.uint8)
    return like.new_empty((rows, contracted), dtype=torch.int8)


def unit_rows(rank: int) -> int:
    """Contracted rows that one unit of 16 rows becomes, for the ranks in ``SHARED_RANKS``."""
    return rank or HADAMARD_ORDER


def sum_rows(units: int) -> int:
    """Rows of the ``sums`` that ``quantize_shared`` returns; ``units`` may be symbolic."""
    return (units + UNITS_PER_SUM - 1) // UNITS_PER_SUM


@torch.library.register_fake("hot::quantize_rows")
def _(
    x: Tensor, bits: int, per_row: bool, stochastic: bool, packed: bool = False
) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    return (
        _quantised(x, rows, round_up(cols, CONTRACT_ALIGN), packed),
        x.new_empty((rows,), dtype=torch.float32),
    )


@torch.library.register_fake("hot::quantize_columns")
def _(
    x: Tensor,
    rank: int,
    tokens: int,
    bits: int,
    per_column: bool,
    stochastic: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    return (
        _quantised(x, cols, contracted_rows(rows, rank, tokens), packed),
        x.new_empty((cols,), dtype=torch.float32),
        x.new_empty((cols,), dtype=torch.float32),
    )


@torch.library.register_fake("hot::quantize_grad")
def _(
    grad_output: Tensor,
    row_bits: int,
    per_row: bool,
    rank: int,
    tokens: int,
    per_column: bool,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ops = torch.ops.hot
    return (
        *ops.quantize_rows(grad_output, row_bits, per_row, True, packed),
        *ops.quantize_columns(grad_output, rank, tokens, 8, per_column, True),
    )


@torch.library.register_fake("hot::compress_int4")
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    groups = (rows + INT4_GROUP - 1) // INT4_GROUP
    return (
        x.new_empty((cols, round_up(rows, CONTRACT_ALIGN) // 2), dtype=torch.uint8),
        x.new_empty((cols, groups), dtype=torch.bfloat16),
        x.new_empty((cols, groups), dtype=torch.bfloat16),
    )


@torch.library.register_fake("hot::expand_int4")
def _(packed: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cols, half = packed.shape
    return (
        packed.new_empty((cols, half * 2), dtype=torch.int8),
        packed.new_empty((cols,), dtype=torch.float32),
        packed.new_empty((cols,), dtype=torch.float32),
    )


@torch.library.register_fake("hot::quantize_shared")
def _(
    grad_output: Tensor, rank: int, tokens: int, summed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, cols = grad_output.shape
    contracted = contracted_rows(rows, rank, tokens)
    units = contracted // unit_rows(rank)

    def floats(length: int) -> Tensor:
        return grad_output.new_empty((length,), dtype=torch.float32)

    return (
        grad_output.new_empty((rows, round_up(cols, CONTRACT_ALIGN)), dtype=torch.int8),
        floats(rows),
        grad_output.new_empty((cols, contracted), dtype=torch.int8),
        floats(contracted),
        floats(units),
        floats(cols),
        grad_output.new_empty((sum_rows(units) if summed else 0, cols), dtype=torch.float32),
    )


@torch.library.register_fake("hot::quantize_weight")
def _(weight: Tensor, equal: Tensor, inputs_first: bool) -> tuple[Tensor, Tensor]:
    outputs, inputs = reversed(weight.shape) if inputs_first else weight.shape
    return (
        weight.new_empty((inputs, round_up(outputs, CONTRACT_ALIGN)), dtype=torch.int8),
        weight.new_empty((inputs,), dtype=torch.float32),
    )


@torch.library.register_fake("hot::compress_int8")
def _(x: Tensor, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    contracted = contracted_rows(rows, rank, tokens)
    tile = unit_rows(rank) * UNITS_PER_TILE
    return (
        x.new_empty((cols, contracted), dtype=torch.int8),
        x.new_empty((cols, (contracted + tile - 1) // tile), dtype=torch.bfloat16),
    )


@torch.library.register_fake("hot::rescale_int4")
def _(
    packed: Tensor, scale: Tensor, minimum: Tensor, fold: Tensor, peak: Tensor
) -> tuple[Tensor, Tensor]:
    cols, half = packed.shape
    return (
        packed.new_empty((cols, half * 2), dtype=torch.int8),
        packed.new_empty((cols,), dtype=torch.float32),
    )


@torch.library.register_fake("hot::rescale_int8")
def _(stored: Tensor, scale: Tensor, fold: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    return (
        stored.new_empty(stored.shape),
        stored.new_empty((stored.shape[0],), dtype=torch.float32),
    )


@torch.library.register_fake("hot::scaled_int_mm")
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    row_term: Tensor | None,
    col_term: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.register_fake("hot::conv_grad_weight")
def _(
    small: Tensor,
    big: Tensor,
    small_scale: Tensor,
    big_scale: Tensor,
    small_zero: Tensor | None,
    big_zero: Tensor | None,
    batch: int,
    small_size: list[int],
    big_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    rank: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return small.new_empty((small.shape[0], *kernel, big.shape[0]), dtype=out_dtype)


@torch.library.register_fake("hot::conv_grad_input")
def _(
    rows: Tensor,
    weight: Tensor,
    row_scale: Tensor,
    weight_scale: Tensor,
    batch: int,
    small_size: list[int],
    big_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    channels = weight.shape[0] // math.prod(kernel)
    return rows.new_empty((batch, *big_size, channels), dtype=out_dtype)
