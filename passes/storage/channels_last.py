"""Which tensors Inductor will lay out channels last, whatever their strides say before lowering.

Where it finds that convolutions gain by it, Inductor gives their outputs, and what is made of them,
a channels-last layout of its own accord. Packing has to follow: reading such a tensor in the order
that its fake strides promise would touch memory in steps of a whole position's channels, and
restoring it in that order would put the backward's convolutions into the slow layout.
"""

from __future__ import annotations

import logging

import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from hot_compile.passes.base.graph import IMAGE_DIMS, aten, is_ours, strip
from hot_compile.passes.base.operators import VIEWS

log = logging.getLogger("hot_compile")

_MARK = "hot_channels_last"


def mark_channels_last(forward: fx.GraphModule) -> None:
    """Note convolutions' outputs and the images made of them, if Inductor changes layouts here."""
    try:
        changes = GraphLowering.decide_layout_opt(forward, is_inference=False)
    except Exception:  # not a stable interface; strides are then taken as they are
        log.debug("hot: Inductor did not say which layout it will choose", exc_info=True)
        return
    for node in forward.graph.nodes if changes else ():
        convolved = node.target is aten.convolution.default or _of_our_rows(node)
        made = node.target not in VIEWS and any(_MARK in n.meta for n in node.all_input_nodes)
        if (convolved or made) and _is_image(node):
            node.meta[_MARK] = True


def _of_our_rows(node: fx.Node) -> bool:
    """A copy of an 8-bit convolution's result, which lies channels last: Inductor leaves it so."""
    if node.target is not aten.clone.default:
        return False
    made = strip(node.args[0], VIEWS)  # type: ignore[arg-type]
    biased = made.target is aten.add.Tensor
    return is_ours(made) or (biased and any(map(is_ours, made.all_input_nodes)))


def _is_image(node: fx.Node) -> bool:
    """Inductor does it for images only, not for signals or volumes."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(value, torch.Tensor) and value.dim() == IMAGE_DIMS


def in_memory(node: fx.Node) -> torch.Tensor:
    """The fake value of ``node`` with the strides that it will have once lowered."""
    value = node.meta["val"]
    if _MARK not in node.meta:
        return value
    with value.fake_mode:
        return value.contiguous(memory_format=torch.channels_last)
