"""What the operators of a head compute, readably, with the whole logits in memory.

A head is a product with a wide weight whose results, the logits, only feed a loss row by row:
y = x W^T + b, z = outer * tanh(inner * y), or z = outer * y without a cap. Every loss made of
log-softmax reads four numbers a row, the *statistics* of z, and its gradient is

    g_z = A exp(z - lse) + B onehot(target) + C column (+ extra)

with one number A, B, C a row: the *coefficients*. Providers (``head/products.py``) compute the
same without ever holding z or its gradient. Statistics are fp32, gradients of z are rounded to x's
dtype before they enter a product, as in the exact graph.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, inner: float, cap: bool, outer: float
) -> Tensor:
    """z [L, O] in fp32 (fp64 for fp64 operands) of x [L, I], W [O, I], b [O]."""
    y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
    y = y if y.dtype == torch.float64 else y.float()
    return outer * torch.tanh(inner * y) if cap else outer * y


def statistics(z: Tensor, target: Tensor | None, column: Tensor | None) -> Tensor:
    """[4, L]: the largest z of a row, log-sum-exp, z at ``target``, sum of z times ``column``.

    Without ``target`` the third is 0. ``target`` [L], int64, from 0 to O - 1. An empty row has no
    meaning: O >= 1.
    """
    picked = z.new_zeros(z.shape[0]) if target is None else z.gather(1, target[:, None])[:, 0]
    total = z.sum(1) if column is None else z @ column.to(z.dtype)
    return torch.stack([z.amax(1), torch.logsumexp(z, 1), picked, total])


def logits_gradient(
    z: Tensor,
    lse: Tensor,
    coefficients: Tensor,
    target: Tensor | None,
    column: Tensor | None,
    extra: Tensor | None,
    extra_scale: float,
    inner: float,
    cap: bool,
    outer: float,
) -> Tensor:
    """Gradient of y [L, O] by the formula above, times the cap's slope 1 - tanh(inner * y)^2.

    Constant factors of the chain (inner, outer) are part of ``coefficients`` [3, L] and of
    ``extra_scale``; ``extra`` [L, O] is a gradient that reaches z from outside the loss.
    """
    a, b, c = coefficients.to(z.dtype)[:, :, None]
    g = a * torch.exp(z - lse[:, None])
    if target is not None:
        g = g.scatter_add(1, target[:, None], b)
    g = g + c * (1 if column is None else column.to(z.dtype))
    if extra is not None:
        g = g + extra_scale * extra
    return g * (1 - (z / outer) ** 2) if cap else g


def products(
    x: Tensor, weight: Tensor, gradient: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(g_x [L, I], g_w [O, I], g_b [O]) of y's gradient [L, O]; empty where not ``wanted``."""
    nothing = x.new_empty(0)
    return (
        gradient @ weight if wanted[0] else nothing,
        gradient.t() @ x if wanted[1] else nothing,
        gradient.sum(0) if wanted[2] else nothing,
    )
