"""Backward graph -> the same, with gradients that come to cuDNN's attention laid out alike.

Torch keeps cuDNN's plan of an attention's backward by the sizes and strides of queries, keys and
values (``MHAParams`` in its ``native/cudnn/MHA.cpp``), not by those of the gradient that comes to
it. Where attentions of one size get gradients that lie in memory in several ways, all run by the
plan of the first, and read elsewhere. A Flux ends so in an illegal memory access, by stock Inductor
as well (H200, torch 2.11): in its single blocks the gradient is a part of a wider one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.site import hint

_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
_KEYS = 4
"""Behind the gradient come queries, keys and values, by which a plan is kept."""


def lay_out_alike(graph: fx.Graph) -> int:
    """Copy gradients that lie otherwise than the first of their plan would, densely; says how many.

    Where all of a plan lie alike nothing changes, be they dense or not.
    """
    plans: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        key = [(operand.meta["val"].shape, _strides(operand)) for operand in node.args[1:_KEYS]]
        plans.setdefault(str(key), []).append(node)
    copied = 0
    for nodes in plans.values():
        if len({_strides(node.args[0]) for node in nodes}) > 1:
            order = _order(nodes[0].args[0])
            copied += sum(_copy(graph, node, order) for node in nodes)
    return copied


def _strides(node: Any) -> tuple[int, ...]:
    return tuple(map(hint, node.meta["val"].stride()))


def _order(node: Any) -> list[int]:
    """Dimensions, outermost in memory first."""
    strides = _strides(node)
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _copy(graph: fx.Graph, node: fx.Node, order: list[int]) -> bool:
    """Have the gradient lie densely in this order; whether it did not."""
    gradient: Any = node.args[0]
    if gradient.meta["val"].permute(order).is_contiguous():
        return False
    emit = Emitter(graph, node, node)
    turned = emit.permute(gradient, order)
    dense = emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
    back = [order.index(dim) for dim in range(len(order))]
    node.args = (emit.permute(dense, back), *node.args[1:])
    return True
