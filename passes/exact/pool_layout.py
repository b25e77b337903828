"""Backward graph -> the same, with gradients of max pools laid out as the images around them.

Inductor finds out how to lay what it writes by strides of what that reads. What a pool's windows
chose is read at half a place's index or less (``exact/pools.py``), which has no stride at the next
place: so it lay channels first, in fp32, between kernels that read channels last. Of a ResNet-10 on
an H200 (1494 images) its two parts took 1167 MiB each, and the step's peak was there.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.inductor_prims import force_stride_order

from hot_compile.passes.base.emit import fake_mode
from hot_compile.passes.base.graph import CHANNEL_DIM, value_of
from hot_compile.passes.exact.pools import GATHERED


def lay_pools(graph: fx.Graph, last: bool) -> int:
    """Write each sum, and each part of it, as images lie; Inductor makes one kernel of them.

    ``last``: they will lie channels last, whatever their strides say. How many gradients there are.
    """
    gathered = [node for node in graph.nodes if GATHERED in node.meta]
    return sum(_lay(graph, node, last) for node in gathered)


def _lay(graph: fx.Graph, node: fx.Node, last: bool) -> bool:
    value = value_of(node)
    if not last and value.stride(CHANNEL_DIM) != 1:
        return False
    with fake_mode(node):
        laid = value.contiguous(memory_format=torch.channels_last)
    if not all(isinstance(step, int) for step in laid.stride()):
        return False
    with graph.inserting_after(node):
        new = graph.call_function(force_stride_order, (node, list(laid.stride())))
    new.meta["val"] = laid
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return bool(node.meta[GATHERED])
