"""Convolutions' kernels that are kept for the backward are kept as the parameters that they are.

Where Inductor lays images out channels last, it copies a convolution's inputs, and a parameter that
autocast casts is such an input: the copy is in fp32. If the backward makes the cast again, the
forward hands on that copy, not the parameter, and four bytes a weight live all the step, 43 MB of a
ResNet-18. What is read through ``as_strided`` Inductor leaves as it lies; the copy is of the cast.
"""

from __future__ import annotations

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.exact.casts import CAST, lies_as_any

_KERNEL_DIMS = 4


def keep_themselves(forward: fx.Graph) -> int:
    """Let casts read ``forward``'s kept kernels through a view; returns how many there are."""
    kept = set(forward.output_node().all_input_nodes)
    found = [n for n in forward.find_nodes(op="placeholder") if n in kept and _is_laid_out_anew(n)]
    for node in found:
        casts = [user for user in node.users if user.op != "output"]
        value, emit = value_of(node), Emitter(forward, casts[0], casts[0])
        view = emit(aten.as_strided.default, node, [*value.shape], [*value.stride()])
        for cast in casts:
            cast.replace_input_with(node, view)
    return len(found)


def _is_laid_out_anew(node: fx.Node) -> bool:
    value, users = node.meta.get("val"), {u.target for u in node.users if u.op != "output"}
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == _KERNEL_DIMS
        and users == {CAST}
        and all(isinstance(size, int) for size in value.shape)
        and value.is_contiguous()
        and not lies_as_any(value)
    )
