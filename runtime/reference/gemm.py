"""Definition of the integer product."""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.runtime.reference.arithmetic import hadamard, unpack_int4
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER


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


def hadamard_int_mm(
    transformed: Tensor,
    equal: Tensor,
    other: Tensor,
    scale: Tensor,
    outputs: int,
    outputs_last: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """g_w of integers that are transformed along the outputs (``quantize_one_read``).

    transformed: int8 [O rounded up to 16, K], times ``equal`` [O rounded up to 16] (one value in a
    block of 16); other: int8 [I, K], times ``scale`` [I]. Returns H (transformed other^T),
    [``outputs``, I], or [I, ``outputs``] if ``outputs_last``. The integer sum is exact for any K;
    H's butterflies are fp32.
    """
    product = (other.double() @ transformed.double().t()).to(torch.float32) * scale.unsqueeze(1)
    blocks = (product * equal).reshape(
        len(other), len(transformed) // HADAMARD_ORDER, HADAMARD_ORDER
    )
    out = hadamard(blocks).reshape(product.shape)[:, :outputs].to(out_dtype)
    return (out if outputs_last else out.t()).contiguous()
