"""Sizes of the operators' results. Every size given may be symbolic; nothing here guards on one."""

from __future__ import annotations

HADAMARD_ORDER = 16
"""Order of the block-diagonal Walsh-Hadamard transform (paper, section 4)."""
CONTRACT_ALIGN = 32
"""A contracted dimension is zero-padded to this many elements (16 bytes when packed INT4)."""
UNITS_PER_TILE = 8
"""Units of 16 rows that share one scale in INT8 storage, and one bound in ``rescale_int8``."""
UNITS_PER_SUM = 4
"""Units of 16 rows that ``quantize_one_read`` adds up, on average, to a row of ``sums``."""
ONE_READ_RANKS = (0, 8)
"""HLA ranks that ``quantize_one_read`` and ``compress_int8`` have kernels for."""


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


def unit_rows(rank: int) -> int:
    """Contracted rows that one unit of 16 rows becomes, for the ranks in ``ONE_READ_RANKS``."""
    return rank or HADAMARD_ORDER


def sum_rows(units: int) -> int:
    """Rows of the ``sums`` that ``quantize_one_read`` returns; ``units`` may be symbolic."""
    return (units + UNITS_PER_SUM - 1) // UNITS_PER_SUM
