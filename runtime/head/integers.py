"""The two products of the logits' gradient on INT8, chunk by chunk (docs/adr/0033).

W and x are quantised once, a chunk's gradient as a layer's g_y is (``hot::quantize_grad``). What
stands at the labels goes beside them, exactly: one value a row that is often larger than all others
together, of which W's row and x's row are known.
"""

from __future__ import annotations

import torch
from torch import Tensor

hot = torch.ops.hot

ALIGN = 32
"""Rows of a chunk are a multiple of this: it is the contracted dimension of g_w's product."""
_PANEL = 2**22
"""Elements of g_w that wait for being added where a product cannot add to its result."""
_LONGEST = 2**16
"""Rows whose products' sums int32 surely holds."""

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define(
    "add_scaled_int_mm(Tensor(a!) total, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale,"
    " bool first) -> ()"
)


class IntegerProducts:
    """g_x and g_w of a head's chunks.

    Args:
        x: [L, I].
        weight: [O, I].
        wanted: g_x; g_w.
    """

    def __init__(self, x: Tensor, weight: Tensor, wanted: list[bool]) -> None:
        self._weight, self._wanted, self._row = weight, wanted, 0
        if wanted[0]:
            self._w, self._w_scale = hot.quantize_columns(weight, 16, 1, 8, True, False)
        if wanted[1]:
            self._x, self._x_scale = hot.quantize_columns(x, 0, 1, 8, True, False)

    def add(
        self, g: Tensor, x: Tensor, target: Tensor | None, grad_x: Tensor | None, total: Tensor
    ) -> None:
        """Write ``grad_x`` [R, I], and add to ``total`` [P, I], for the next R rows.

        ``g`` [R, P] is y's gradient; its values at ``target`` [R] become zero. The first rows'
        ``total`` is written, not read.
        """
        first, rows = self._row, len(x)
        self._row += rows
        spike = None
        if target is not None:
            spike = g.gather(1, target[:, None])
            g.scatter_(1, target[:, None], 0.0)
        row, row_scale, column, column_scale = hot.quantize_grad(g, 8, True, 0, 1, True)
        if grad_x is not None:
            dtype = grad_x.dtype
            made = hot.scaled_int_mm(row, self._w, row_scale, self._w_scale, None, None, dtype)
            if spike is None:
                grad_x.copy_(made)
            else:
                torch.addcmul(made, spike, self._weight[target], out=grad_x)
        if self._wanted[1]:
            known = self._x[:, first : first + column.shape[1]]
            add_product(total, column, known, column_scale, self._x_scale, first == 0)
            if spike is not None:  # in an order of its own: the same every time
                total.index_put_((target,), spike.float() * x, accumulate=True)


def add_product(
    total: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, first: bool
) -> None:
    """total [M, N] (fp32) += (a b^T) * a_scale * b_scale; ``first``: it holds nothing yet.

    Without a second tensor of that size.
    """
    add = hot.add_scaled_int_mm if _adds(total, a.shape[1]) else _add_panels
    add(total, a, b, a_scale, b_scale, first)


def _add_panels(
    total: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, first: bool
) -> None:
    """``hot::add_scaled_int_mm``, some rows of ``total`` after others."""
    rows = max(1, _PANEL // total.shape[1])
    panels = zip(*(t.split(rows) for t in (total, a, a_scale)), strict=True)
    for own, values, scale in panels:
        made = hot.scaled_int_mm(values, b, scale, b_scale, None, None, torch.float32)
        own.copy_(made) if first else own.add_(made)


_LIBRARY.impl("add_scaled_int_mm", _add_panels, "CompositeExplicitAutograd")


def _adds(total: Tensor, contracted: int) -> bool:
    """There is a product that adds to its result as it writes it: Hopper's."""
    if not total.is_cuda or total.shape[1] % 4 or contracted > _LONGEST:
        return False
    return torch.cuda.get_device_capability(total.device) == (9, 0)
