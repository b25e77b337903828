"""One convolution's backward on integers: tensors in, tensors out. Never chooses.

A *small* tensor has one value for every kernel position, a *big* one is what the kernel slides over
(``Convolution``). Both are handed to the operators as rows [positions, channels]: a view where the
channels come last in memory, a copy that Inductor fuses where they do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hot_compile.config import Strategy
from hot_compile.passes.base.emit import channels_first
from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.site import ConvNodes, Site
from hot_compile.passes.layers.decision import Decision
from hot_compile.passes.layers.positions import channels_last, rows_of, tiled, unfolded
from hot_compile.passes.layers.strategies import Kept

hot = torch.ops.hot


class ConvStrategy:
    """A strategy's functions for one convolution, on tensors or nodes in their place (``Traced``).

    Args:
        site: of a convolution. decision: what it is given.
        dtype: of the results; the layer's, unless told.
    """

    def __init__(self, site: Site, decision: Decision, dtype: torch.dtype | None = None) -> None:
        assert site.conv is not None
        assert isinstance(site.nodes, ConvNodes)
        d, conv, nodes = decision, site.conv, site.nodes
        self.dtype = dtype or site.dtype
        self.conv = conv
        self.nodes = nodes
        self.d = d
        self.wants_gx = nodes.grad_input is not None
        self.wants_gw = nodes.grad_weight is not None
        self.integer_gw = self.wants_gw and d.strategy is not Strategy.GX_ONLY
        folds = conv.is_product or not conv.transposed
        self.integer_gx = self.wants_gx and folds and d.strategy is not Strategy.GW_ONLY
        # the paper's text: 16 consecutive rows of the unfolded x are what HLA transforms and keeps
        self.im2col = d.rank > 0 and not d.tiles and not conv.is_product

    def keep(self, x: Tensor) -> Kept:
        """What the products want of x: (q, scale); x itself where g_w is exact."""
        if not self.integer_gw:
            return (x,)
        return self._columns(x, self.conv.transposed, False)

    def gradients(
        self, g_y: Tensor, weight: Tensor, kept: Kept
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(g_x, g_w, g_b), None where the graph wants none."""
        row, column = self._quantize_grad(g_y)
        gx = gw = gb = None
        if self.wants_gx:
            integer = self.integer_gx
            gx = self._grad_input(g_y, weight, row) if integer else self._exact_gx(g_y, weight)
        if self.integer_gw:
            gw = self._grad_weight(g_y, kept, column)
        elif self.wants_gw:
            gw = self._exact_gw(g_y, weight, *kept)
        if self.nodes.grad_bias is not None:
            gb = aten.sum.dim_IntList(g_y, [n for n in range(len(self.conv.kernel) + 2) if n != 1])
        return gx, gw, gb

    # shapes of tensors

    def _geometry(self, g_y: Tensor) -> tuple[Any, ...]:
        conv = self.conv
        batch: Any = conv.batch
        if not isinstance(batch, int):
            batch = aten.sym_size.int(g_y, 0)
        sizes = (conv.small_size, conv.big_size, conv.kernel, conv.stride)
        return (batch, *map(list, (*sizes, conv.padding, conv.dilation)))

    # quantised operands

    def _columns(self, tensor: Tensor, is_small: bool, stochastic: bool) -> Kept:
        """(q, scale) of one operand of g_w."""
        d, conv = self.d, self.conv
        if self.im2col and not is_small:
            rows, rank = unfolded(tensor, self.conv), d.rank
        else:
            rows = rows_of(tensor)
            rank = d.rank if is_small or conv.is_product else 0
            if rank and d.tiles:
                rows = tiled(rows, conv.small_size)
        args = (rows, rank, 1, 8, d.per_channel, stochastic)
        return hot.quantize_columns.default(*args)

    def _quantize_grad(self, g: Tensor) -> tuple[Kept, Kept]:
        """(row form for g_x, column form for g_w) of g_y, in one operator where they share rows."""
        d = self.d
        per_row = d.per_channel or d.per_token
        shares = self.conv.is_product or not self.conv.transposed
        if self.integer_gx and self.integer_gw and shares and not (d.rank and d.tiles):
            args: tuple[Any, ...] = (rows_of(g), d.gx_bits, per_row, d.rank, 1, d.per_channel)
            both = hot.quantize_grad.default(*args)
            return both[:2], both[2:]
        row: Kept = ()
        if self.integer_gx:
            row = hot.quantize_rows.default(rows_of(g), d.gx_bits, per_row, True)
        return row, self._columns(g, not self.conv.transposed, True) if self.integer_gw else ()

    def _weight(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """W transformed along O and quantised: (q [kk * C, O padded], scale)."""
        d, shape = self.d, w.shape
        if self.conv.transposed:  # a product: [C_in, C_out]
            rows = aten.reshape.default(w, [shape[0], shape[1]])
            return hot.quantize_rows.default(rows, d.gx_bits, d.per_channel, False)
        columns = aten.reshape.default(channels_last(w), [shape[0], -1])
        args = (columns, 16, 1, d.gx_bits, d.per_channel, False)
        q, scale = hot.quantize_columns.default(*args)
        return q, scale

    # results

    def _grad_input(self, g_y: Tensor, weight: Tensor, row: Kept) -> Tensor:
        conv, like = self.conv, value_of(self.nodes.grad_input)
        w_q, w_scale = self._weight(weight)
        operands = (row[0], w_q, row[1], w_scale)
        if not conv.is_product:
            args = (*operands, *self._geometry(g_y), self.dtype)
            return channels_first(hot.conv_grad_input.default(*args), like)
        new = hot.scaled_int_mm.default(*operands, None, None, self.dtype)
        new = aten.reshape.default(new, [-1, *conv.big_size, like.shape[1]])
        return channels_first(new, like)

    def _grad_weight(self, g_y: Tensor, kept: Kept, column: Kept) -> Tensor:
        """[S, C, *kernel], S the channels of the small side."""
        conv, like = self.conv, value_of(self.nodes.grad_weight)
        small, big = column, kept
        if conv.transposed:
            small, big = big, small
        operands = (small[0], big[0], small[1], big[1])
        if conv.is_product or self.im2col:
            new = hot.scaled_int_mm.default(*operands, None, None, self.dtype)
            shape = [new.shape[0], *conv.kernel, conv.big_channels]
            return channels_first(aten.reshape.default(new, shape), like)
        args = (*operands, *self._geometry(g_y), self.d.rank, self.dtype)
        return channels_first(hot.conv_grad_weight.default(*args), like)

    def _exact_gx(self, g_y: Tensor, weight: Tensor) -> Tensor:
        """g_x of a transposed convolution is a convolution, and the other way round."""
        conv = self.conv
        settings = (list(conv.stride), list(conv.padding), list(conv.dilation))
        missing = [0] * len(conv.kernel)  # positions at the end that no window reached
        if not conv.transposed:
            sizes = (conv.big_size, conv.small_size, conv.kernel, *settings)
            missing = [
                big - (small - 1) * stride + 2 * pad - dilation * (kernel - 1) - 1
                for big, small, kernel, stride, pad, dilation in zip(*sizes, strict=True)
            ]
        args = (*settings, not conv.transposed, missing, 1)
        return aten.convolution.default(g_y, weight, None, *args)

    def _exact_gw(self, g_y: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        settings = self.nodes.backward.args[3:10]
        mask = [False, True, False]
        return aten.convolution_backward.default(g_y, x, weight, *settings, mask)[1]
