"""Backward graph -> the same, with what convolutions' backwards read laid out as images are,
channels last.

A gradient of parts (``cat``, ``slice``), or of a mean, begins as zeros or as an expanded number,
whose channels lie first; so may parts of an image that a convolution has read. ATen turns them
round, once for the gradient of the image and once for that of the weight (3.5 of the 26 ms of a
DPN's step on an H200). Where it finds neither the image nor the weight channels last, it turns the
gradient instead, and takes its own kernels for depthwise convolutions: 84 ms of a MixNet's 183,
where cuDNN takes 39. The kernel that makes what is read may as well write it so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import CHANNEL_DIM, IMAGE_DIMS, aten, rank_of, value_of
from hot_compile.passes.base.site import hint, positions_of
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD

_GRAD_OUTPUT, _INPUT = 0, 1
"""Where a convolution's backward has them among its arguments."""


def lay_as_images(graph: fx.Graph) -> int:
    """Copy, channels last, gradients that convolutions' backwards read; on a GPU images, too. Says
    how many.

    Inductor drops what lies so already, and has the kernel that makes a value write the copy.
    """
    copies: dict[Any, fx.Node] = {}
    for backward in graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        for place in (_GRAD_OUTPUT, _INPUT):
            read: Any = backward.args[place]
            if not _is_image(read) or _is_laid(read) or (place == _INPUT and not _on_gpu(read)):
                continue
            if read not in copies:
                emit, layout = Emitter(graph, backward, backward), torch.channels_last
                copies[read] = emit(aten.clone.default, read, memory_format=layout)
            backward.update_arg(place, copies[read])
    return len(copies)


def _both_layouts(value: torch.Tensor) -> bool:
    """Channels first and last are the same memory: of one channel, or of one position."""
    return hint(value.shape[CHANNEL_DIM]) == 1 or positions_of(value) == 1


def _on_gpu(read: fx.Node) -> bool:
    return value_of(read).is_cuda


def _is_image(read: fx.Node) -> bool:
    """Of sizes by which its layout matters."""
    return rank_of(read) == IMAGE_DIMS and not _both_layouts(value_of(read))


def _is_laid(read: fx.Node) -> bool:
    """A convolution's backward leaves it so, or a copy."""
    if read.target is operator.getitem:
        return read.args[0].target is CONVOLUTION_BACKWARD  # type: ignore[union-attr]
    copied = read.target is aten.clone.default
    return copied and read.kwargs.get("memory_format") is torch.channels_last
