"""One Linear whose g_y is quantised once for both products (docs/adr/0005). Never chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from hot_compile.config import Strategy
from hot_compile.passes.emit import prims
from hot_compile.passes.graph import aten
from hot_compile.passes.plan import Decision
from hot_compile.passes.site import Site, SiteNodes

if TYPE_CHECKING:
    from hot_compile.passes.rewrite import Builder


def build_shared(b: Builder, site: Site, d: Decision) -> list[tuple[fx.Node, fx.Node]]:
    """New nodes for one layer that computes g_x and g_w: [(old result, its replacement)]."""
    ops, nodes = torch.ops.hot, site.nodes
    assert isinstance(nodes, SiteNodes)
    gx, gw = nodes.grad_input, nodes.grad_weight
    assert gx is not None
    assert gw is not None
    saved = _compress(b, nodes, d)
    first, g = min(gx, gw), nodes.grad_output  # nodes order by place
    bias = _grad_bias(g, first)
    args = (g, d.rank, d.tokens, *((True,) if bias else ()))
    both = b.call(first, False, first, ops.quantize_shared.default, *args)
    row_q, row_scale, col_q, fold, peak, equal, sums = b.parts(both)
    w = b.call(gx, False, gx, ops.quantize_weight.default, nodes.weight, equal, nodes.weight_is_io)
    w_q, w_scale = b.parts(w)
    product = ops.scaled_int_mm.default
    new_gx = b.call(gx, False, gx, product, row_q, w_q, row_scale, w_scale, None, None, site.dtype)
    rescale = ops.rescale_int4 if d.strategy is Strategy.INT4 else ops.rescale_int8
    x_q, x_scale = b.parts(b.call(gw, False, gw, rescale.default, *saved, fold, peak))
    operands = (col_q, x_q, equal, x_scale)
    if nodes.grad_weight_is_io:
        operands = (x_q, col_q, x_scale, equal)
    new_gw = b.call(gw, False, gw, product, *operands, None, None, site.dtype)
    swaps = [(gx, new_gx), (gw, new_gw)]
    return swaps + ([(bias, _total(b, bias, sums))] if bias else [])


def _compress(b: Builder, nodes: SiteNodes, d: Decision) -> tuple[fx.Node, ...]:
    """What the forward keeps of x, made right behind the forward product."""
    ops, at = torch.ops.hot, nodes.forward
    if d.strategy is Strategy.INT4:
        return b.parts(b.call(at, True, at, ops.compress_int4.default, nodes.x))
    return b.parts(b.call(at, True, at, ops.compress_int8.default, nodes.x, d.rank, d.tokens))


def _grad_bias(grad_output: fx.Node, behind: fx.Node) -> fx.Node | None:
    """The sum over g_y's rows, if the graph wants it and not before g_y is quantised.

    Whoever quantises g_y reads all of it anyway.
    """
    for user in grad_output.users:
        sums_rows = user.target is aten.sum.dim_IntList and list(user.args[1]) == [0]  # type: ignore[arg-type]
        if sums_rows and not user.kwargs and behind < user:
            return user
    return None


def _total(b: Builder, bias: fx.Node, sums: fx.Node) -> fx.Node:
    """``sums`` added up, as ``bias`` has it."""
    total = b.call(bias, False, bias, aten.sum.dim_IntList, sums, *bias.args[1:])
    dtype = bias.meta["val"].dtype
    if dtype is torch.float32:
        return total
    return b.call(bias, False, bias, prims.convert_element_type.default, total, dtype)
