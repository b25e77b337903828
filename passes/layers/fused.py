"""Layers whose outputs go different ways, as a fused qkv's or a gated unit's do.

Their g_y is put together from the gradients of what came of each part, and those need not be of one
size: k's may be a hundredth of v's (docs/adr/0005).
"""

from __future__ import annotations

from torch import fx

from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.base.operators import CASTS, VIEWS

_PUT_TOGETHER = {
    aten.cat.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.constant_pad_nd.default,
}
_AS_IT_WAS = VIEWS | CASTS | {aten.clone.default}


_MOST_PARTS = 8


def put_together(grad_output: fx.Node, most: int = _MOST_PARTS) -> bool:
    """g_y consists of parts: a concatenation, or a sum of parts that were put in their places."""
    base = strip(grad_output, _AS_IT_WAS)
    if base.target is aten.add.Tensor and most > 1:
        return all(put_together(node, most - 1) for node in base.all_input_nodes)
    return base.target in _PUT_TOGETHER
