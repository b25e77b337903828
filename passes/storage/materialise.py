"""Which values of the backward are written to memory where Inductor would work them out anew.

On a GPU the backend lets Inductor work out longer expressions in each of their readers' kernels, so
that what was stored is restored there (``backend._RESTORED_OPERATIONS``). What lies behind a norm's
sums must not be: the gradient along a residual stream would be added up again, from all that
was added before, in every norm that it passes.
"""

from __future__ import annotations

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import IMAGE_DIMS
from hot_compile.passes.base.operators import CASTS, REDUCTIONS, VIEWS, is_pointwise

_FOLLOWED = VIEWS | CASTS


def materialise(backward: fx.Graph) -> int:
    """Read what several readers have, and what lies behind sums, from memory; returns how many."""
    behind: set[fx.Node] = set()
    count = 0
    for node in list(backward.nodes):
        follows = node.target in _FOLLOWED or is_pointwise(node)
        sources = node.all_input_nodes
        if not follows or not any(n in behind or n.target in REDUCTIONS for n in sources):
            continue
        if is_pointwise(node) and len(node.users) > 1 and _plain(node):
            _from_memory(backward, node)
            count += 1
        else:
            behind.add(node)
    return count


def _plain(node: fx.Node) -> bool:
    """Its strides are those that Inductor will give it: images' may change."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return False
    rows = 1 < value.dim() < IMAGE_DIMS
    return rows and value.device.type == "cuda" and value.is_contiguous()


def _from_memory(graph: fx.Graph, node: fx.Node) -> None:
    readers = [user for user in node.users if user.op != "output"]
    read = Emitter(graph, node.next, node).from_memory(node)
    for reader in readers:
        reader.replace_input_with(node, read)
