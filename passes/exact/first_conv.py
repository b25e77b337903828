"""Small questions about a network's first convolution, whose image nobody wants the gradient of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD

CHANNEL_MULTIPLE = 8
"""cuDNN's fast kernels take channels in multiples of this."""


def suits_cudnn(channels: int | torch.SymInt) -> bool:
    """cuDNN need not pad so many channels."""
    return bool(channels % CHANNEL_MULTIPLE == 0)


def slow_in_cudnn(x: torch.Tensor) -> str:
    """'' where cuDNN is at work and pads the channels of x [B, C, ...]; else what is otherwise."""
    if x.device.type != "cuda":
        return f"cuDNN is slow at so few channels, but this runs on {x.device.type}"
    return f"cuDNN has fast kernels for {x.shape[1]} channels" if suits_cudnn(x.shape[1]) else ""


def backwards_of(conv: fx.Node) -> list[fx.Node]:
    """The backward of ``conv``, as far as it is still a convolution's."""
    x, weight = conv.args[:2]
    assert isinstance(x, fx.Node)
    return [u for u in x.users if u.target is CONVOLUTION_BACKWARD and u.args[1:3] == (x, weight)]


def wants_grad_input(backward: fx.Node) -> bool:
    """Whether the gradient of the image is asked for."""
    mask: Any = backward.args[10]
    return bool(mask[0])
