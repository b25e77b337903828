"""Backward graph -> the same, with gradients of images laid out as the images are, channels last.

A gradient of parts (``cat``, ``slice``), or of a mean, begins as zeros or as an expanded number,
whose channels lie first. ATen turns it round for a convolution's backward, once for the gradient of
the image and once for that of the weight (3.5 of the 26 ms of a DPN's step on an H200). The kernel
that makes it may as well write it so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import IMAGE_DIMS, aten, rank_of
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD


def lay_as_images(graph: fx.Graph) -> int:
    """Copy, channels last, what comes to convolutions' backwards; says how many.

    Inductor drops what lies so already, and has the kernel that makes a gradient write the copy.
    """
    copies: dict[Any, fx.Node] = {}
    for backward in graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        grad_output: Any = backward.args[0]
        if rank_of(grad_output) != IMAGE_DIMS or _is_laid(grad_output):
            continue
        if grad_output not in copies:
            emit, layout = Emitter(graph, backward, backward), torch.channels_last
            copies[grad_output] = emit(aten.clone.default, grad_output, memory_format=layout)
        backward.args = (copies[grad_output], *backward.args[1:])
    return len(copies)


def _is_laid(gradient: fx.Node) -> bool:
    """A convolution's backward leaves it so, or a copy."""
    if gradient.target is operator.getitem:
        return gradient.args[0].target is CONVOLUTION_BACKWARD  # type: ignore[union-attr]
    copied = gradient.target is aten.clone.default
    return copied and gradient.kwargs.get("memory_format") is torch.channels_last
