"""Definition of the integer product."""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import unpack_int4


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
