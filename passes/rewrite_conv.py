"""One convolution's Site -> ``hot::`` nodes for its backward. Never chooses.

A *small* tensor has one value for every kernel position, a *big* one is what the kernel slides over
(``Convolution``). Both are handed to the operators as rows [positions, channels]: a view where the
channels come last in memory, a copy that Inductor fuses where they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hot_compile.config import Strategy
from hot_compile.passes.emit import channels_first
from hot_compile.passes.graph import aten
from hot_compile.passes.plan import Decision
from hot_compile.passes.site import ConvNodes, Convolution, Site
from hot_compile.runtime.reference.conv import tile_counts, tile_shape

if TYPE_CHECKING:
    from hot_compile.passes.rewrite import Builder

Parts = tuple[fx.Node, ...]


def build_convolution(b: Builder, site: Site, d: Decision) -> list[tuple[fx.Node, fx.Node]]:
    """New nodes for one convolution: [(old result, its replacement)]."""
    assert site.conv is not None
    assert isinstance(site.nodes, ConvNodes)
    return _Convolution(b, site, site.conv, site.nodes, d).swaps()


class _Convolution:
    """The nodes of one convolution under construction."""

    def __init__(
        self, b: Builder, site: Site, conv: Convolution, nodes: ConvNodes, d: Decision
    ) -> None:
        self.b = b
        self.dtype = site.dtype
        self.conv = conv
        self.nodes = nodes
        self.d = d
        self.place = nodes.forward
        self.after = True
        self.gw = nodes.grad_weight is not None and d.strategy is not Strategy.GX_ONLY
        self.integer_gx = nodes.grad_input is not None and (conv.is_product or not conv.transposed)
        # the paper's text: 16 consecutive rows of the unfolded x are what HLA transforms and keeps
        self.im2col = d.rank > 0 and not d.tiles and not conv.is_product

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """The next node: behind the forward convolution, later before the backward one."""
        like = self.nodes.forward if self.after else self.nodes.backward
        node = self.b.call(self.place, self.after, like, op, *args, **kwargs)
        if self.after:
            self.place = node
        return node

    def parts(self, node: fx.Node) -> Parts:
        made = self.b.parts(node)
        if self.after:
            self.place = made[-1]
        return made

    def swaps(self) -> list[tuple[fx.Node, fx.Node]]:
        nodes = self.nodes
        kept = self._keep() if self.gw else ()
        self.place, self.after = nodes.backward, False
        swaps = []
        row, column = self._quantize_grad()
        if nodes.grad_input is not None:
            new = self._grad_input(row) if self.integer_gx else self._exact_grad_input()
            swaps.append((nodes.grad_input, new))
        if nodes.grad_weight is not None:
            new = self._grad_weight(kept, column) if self.gw else self._exact_grad_weight()
            swaps.append((nodes.grad_weight, new))
        if nodes.grad_bias is not None:
            over = [n for n in range(len(self.conv.kernel) + 2) if n != 1]
            new = self.call(aten.sum.dim_IntList, nodes.grad_output, over)
            swaps.append((nodes.grad_bias, new))
        return swaps

    # shapes of tensors

    def _rows(self, tensor: fx.Node) -> fx.Node:
        """[B, C, *size] -> [positions, C]."""
        channels = tensor.meta["val"].shape[1]
        last = self._channels_last(tensor)
        return self.call(aten.reshape.default, last, [-1, channels])

    def _channels_last(self, tensor: fx.Node) -> fx.Node:
        dims = tensor.meta["val"].dim()
        return self.call(aten.permute.default, tensor, [0, *range(2, dims), 1])

    def _tiled(self, rows: fx.Node) -> fx.Node:
        """Rows of small positions in order of Hadamard tiles: ``reference.conv.tile_rows``."""
        size = self.conv.small_size
        channels = rows.meta["val"].shape[1]
        shape, counts = tile_shape(len(size)), tile_counts(size)
        x = self.call(aten.reshape.default, rows, [-1, *size, channels])
        pad = [0, 0]
        for n, tile, count in reversed(list(zip(size, shape, counts, strict=True))):
            pad += [0, tile * count - n]
        if any(pad):
            x = self.call(aten.constant_pad_nd.default, x, pad, 0.0)
        split = [n for pair in zip(counts, shape, strict=True) for n in pair]
        dims = len(size)
        order = [1 + 2 * i for i in range(dims)] + [2 + 2 * i for i in range(dims)]
        x = self.call(aten.reshape.default, x, [-1, *split, channels])
        x = self.call(aten.permute.default, x, [0, *order, 1 + 2 * dims])
        return self.call(aten.reshape.default, x, [-1, channels])

    def _unfolded(self, big: fx.Node) -> fx.Node:
        """[B, C, *size] -> im2col rows [L, kk * C]."""
        conv, dims = self.conv, len(self.conv.kernel)
        pad = [p for padding in reversed(conv.padding) for p in (padding, padding)]
        x = self.call(aten.constant_pad_nd.default, big, pad, 0.0) if any(pad) else big
        for i in range(dims):
            span = (conv.kernel[i] - 1) * conv.dilation[i] + 1
            x = self.call(aten.unfold.default, x, 2 + i, span, conv.stride[i])
        for i in range(dims):
            if conv.dilation[i] > 1:
                end, step = 2**63 - 1, conv.dilation[i]
                x = self.call(aten.slice.Tensor, x, 2 + dims + i, 0, end, step)
        x = self.call(aten.permute.default, x, [0, *range(2, 2 + 2 * dims), 1])
        return self.call(aten.reshape.default, x, [-1, conv.offsets * conv.big_channels])

    def _channels_first(self, new: fx.Node, old: fx.Node) -> fx.Node:
        return channels_first(self.call, new, old.meta["val"])

    def _geometry(self) -> tuple[Any, ...]:
        conv = self.conv
        batch: Any = conv.batch
        if not isinstance(batch, int):
            batch = self.call(aten.sym_size.int, self.nodes.grad_output, 0)
        sizes = (conv.small_size, conv.big_size, conv.kernel, conv.stride)
        return (batch, *map(list, (*sizes, conv.padding, conv.dilation)))

    # quantised operands

    def _columns(self, tensor: fx.Node, is_small: bool, stochastic: bool) -> Parts:
        """(q, scale, total) of one operand of g_w."""
        d, conv = self.d, self.conv
        if self.im2col and not is_small:
            rows, rank = self._unfolded(tensor), d.rank
        else:
            rows = self._rows(tensor)
            rank = d.rank if is_small or conv.is_product else 0
            if rank and d.tiles:
                rows = self._tiled(rows)
        args = (rows, rank, 1, 8, d.per_channel, stochastic)
        return self.parts(self.call(torch.ops.hot.quantize_columns.default, *args))

    @property
    def _packs(self) -> bool:
        """x is kept as INT4: also by tiles of a kernel that overlaps, transformed when unfolded."""
        if self.d.strategy is Strategy.HLA8:
            return self.d.tiles and not self.conv.is_product and not self.conv.transposed
        return self.d.strategy is Strategy.INT4

    def _keep(self) -> Parts:
        """What the forward keeps of x."""
        if self._packs:
            rows = self._rows(self.nodes.x)
            return self.parts(self.call(torch.ops.hot.compress_int4.default, rows))
        return self._columns(self.nodes.x, self.conv.transposed, False)[:2]

    def _quantize_grad(self) -> tuple[Parts, Parts]:
        """(row form for g_x, column form for g_w) of g_y, in one operator where they share rows."""
        d, g = self.d, self.nodes.grad_output
        ops = torch.ops.hot
        per_row = d.per_channel or d.per_token
        shares = self.conv.is_product or not self.conv.transposed
        if self.integer_gx and self.gw and shares and not (d.rank and d.tiles):
            args: tuple[Any, ...] = (self._rows(g), d.gx_bits, per_row, d.rank, 1, d.per_channel)
            both = self.parts(self.call(ops.quantize_grad.default, *args))
            return both[:2], both[2:]
        row: Parts = ()
        if self.integer_gx:
            args = (self._rows(g), d.gx_bits, per_row, True)
            row = self.parts(self.call(ops.quantize_rows.default, *args))
        return row, self._columns(g, not self.conv.transposed, True) if self.gw else ()

    def _weight(self) -> tuple[fx.Node, fx.Node]:
        """W transformed along O and quantised: (q [kk * C, O padded], scale)."""
        ops, d, w = torch.ops.hot, self.d, self.nodes.weight
        shape = w.meta["val"].shape
        if self.conv.transposed:  # a product: [C_in, C_out]
            rows = self.call(aten.reshape.default, w, [shape[0], shape[1]])
            args: tuple[Any, ...] = (rows, d.gx_bits, d.per_channel, False)
            q, scale = self.parts(self.call(ops.quantize_rows.default, *args))
            return q, scale
        columns = self.call(aten.reshape.default, self._channels_last(w), [shape[0], -1])
        args = (columns, 16, 1, d.gx_bits, d.per_channel, False)
        q, scale, _ = self.parts(self.call(ops.quantize_columns.default, *args))
        return q, scale

    # results

    def _grad_input(self, row: Parts) -> fx.Node:
        ops, conv, old = torch.ops.hot, self.conv, self.nodes.grad_input
        assert old is not None
        w_q, w_scale = self._weight()
        operands = (row[0], w_q, row[1], w_scale)
        if not conv.is_product:
            args = (*operands, *self._geometry(), self.dtype)
            return self._channels_first(self.call(ops.conv_grad_input.default, *args), old)
        new = self.call(ops.scaled_int_mm.default, *operands, None, None, self.dtype)
        channels = self.nodes.x.meta["val"].shape[1]
        new = self.call(aten.reshape.default, new, [-1, *conv.big_size, channels])
        return self._channels_first(new, old)

    def _grad_weight(self, kept: Parts, column: Parts) -> fx.Node:
        """[S, C, *kernel], S the channels of the small side."""
        ops, conv, old = torch.ops.hot, self.conv, self.nodes.grad_weight
        assert old is not None
        x_q, x_scale, x_zero = kept[0], kept[1], None
        if self._packs:
            x_q, x_scale, x_zero = self.parts(self.call(ops.expand_int4.default, *kept))
        g_q, g_scale, total = column
        pairs = [(g_q, x_q), (g_scale, x_scale), (total if x_zero is not None else None, x_zero)]
        if conv.transposed:
            pairs = [(x, g) for g, x in pairs]
        (small, big), scales, terms = pairs
        if conv.is_product or self.im2col:
            args = (small, big, *scales, *terms, self.dtype)
            new = self.call(ops.scaled_int_mm.default, *args)
            shape = [new.meta["val"].shape[0], *conv.kernel, conv.big_channels]
            return self._channels_first(self.call(aten.reshape.default, new, shape), old)
        zeros = (x_zero, None) if conv.transposed else (None, x_zero)
        rank = self.d.rank
        args = (small, big, *scales, *zeros, *self._geometry(), rank, self.dtype)
        return self._channels_first(self.call(ops.conv_grad_weight.default, *args), old)

    def _exact_grad_input(self) -> fx.Node:
        """g_x of a transposed convolution is a convolution."""
        conv, nodes = self.conv, self.nodes
        settings = (list(conv.stride), list(conv.padding), list(conv.dilation))
        zeros = [0] * len(conv.kernel)
        args = (nodes.grad_output, nodes.weight, None, *settings, False, zeros, 1)
        return self.call(aten.convolution.default, *args)

    def _exact_grad_weight(self) -> fx.Node:
        args = (*self.nodes.backward.args[:10], [False, True, False])
        return self.parts(self.call(aten.convolution_backward.default, *args))[1]
