"""One Linear whose g_y is quantised once for both products (docs/adr/0005). Never chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hot_compile.config import Strategy
from hot_compile.passes.emit import prims
from hot_compile.passes.graph import CASTS, aten, strip
from hot_compile.passes.plan import Decision
from hot_compile.passes.site import Site, SiteNodes, hint

if TYPE_CHECKING:
    from hot_compile.passes.rewrite import Builder

_SAME_ORDER = CASTS | {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
"""They leave all elements, and leave them in their order."""


def build_shared(b: Builder, site: Site, d: Decision) -> list[tuple[fx.Node, fx.Node]]:
    """New nodes for one layer that computes g_x and g_w: [(old result, its replacement)]."""
    ops, nodes = torch.ops.hot, site.nodes
    assert isinstance(nodes, SiteNodes)
    gx, gw = nodes.grad_input, nodes.grad_weight
    assert gx is not None
    assert gw is not None
    saved = _compress(b, nodes, d)
    g = nodes.grad_output
    bias = _grad_bias(g)
    first = min(n for n in (gx, gw, bias) if n is not None)  # nodes order by place
    args = (g, d.rank, d.tokens, *((True,) if bias else ()))
    both = b.call(first, False, first, ops.quantize_one_read.default, *args)
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


def _grad_bias(grad_output: fx.Node) -> fx.Node | None:
    """The sum over g_y's rows, if the graph wants it: whoever quantises g_y reads all of it anyway.

    It may be taken of g_y in another shape, of another cast to the same dtype, or of an exact copy
    in fp32.
    """
    g: torch.Tensor = grad_output.meta["val"]
    dtype, base = g.dtype, strip(grad_output, _SAME_ORDER)
    stack, seen = [(base, base.meta["val"].dtype == dtype)], {base}
    while stack:
        node, equal = stack.pop()
        for user in node.users:
            if equal and user.users and _sums_rows(user, g) and _precedes(grad_output, user):
                return user
            if user in seen or user.target not in _SAME_ORDER:
                continue
            now = user.meta["val"].dtype
            seen.add(user)
            stack.append((user, now == dtype or (equal and now is torch.float32)))
    return None


def _precedes(grad_output: fx.Node, total: fx.Node) -> bool:
    """g_y comes before ``total`` in the graph, moved there if need be and nothing is in the way."""
    if grad_output < total:
        return True
    chain, node = [], grad_output
    while not node < total:  # ends at the base of both at the latest
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    needed = {n for moved in chain for n in moved.all_input_nodes} - set(chain)
    if not all(n < total for n in needed):
        return False
    for moved in reversed(chain):
        total.prepend(moved)
    return True


def _sums_rows(node: fx.Node, g: torch.Tensor) -> bool:
    """Sums all of ``g`` [L, O] but over the last dimension, which is O."""
    if node.target is not aten.sum.dim_IntList:
        return False
    args: Any = node.args
    summed: torch.Tensor = args[0].meta["val"]
    rest = {dim % summed.dim() for dim in args[1]} == set(range(summed.dim() - 1))
    return rest and summed.shape[-1] == g.shape[-1] and hint(summed.numel()) == hint(g.numel())


def _total(b: Builder, bias: fx.Node, sums: fx.Node) -> fx.Node:
    """``sums`` added up, as ``bias`` has it."""
    wanted: torch.Tensor = bias.meta["val"]
    total = b.call(bias, False, bias, aten.sum.dim_IntList, sums, [0])
    if wanted.dim() > 1:
        total = b.call(bias, False, bias, aten.reshape.default, total, list(wanted.shape))
    if wanted.dtype is torch.float32:
        return total
    return b.call(bias, False, bias, prims.convert_element_type.default, total, wanted.dtype)
