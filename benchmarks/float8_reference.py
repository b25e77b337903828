"""Training in float8 as torchao's recipe ``tensorwise`` does it, on any device, by rounding only.

x and W are rounded to e4m3 and g_y to e5m2, each with one scale a tensor, set by its largest value
in that very step; all three products of a layer are of rounded operands. The products themselves
run in the tensors' own dtype. That flatters float8 a little: in the forward torchao lets hardware
add up in fewer bits. A model is evaluated as it trains, in float8, as torchao's is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = ("head", "fc", "classifier", "lm_head")
_MULTIPLE = 16
_LEAST = 1e-12
"""What torchao divides by instead of zero."""


def takes_float8(module: nn.Module, path: str) -> bool:
    """Whether torchao's documentation would have the layer converted: every one but the head whose
    sizes hardware can take. Of a convolution these are its channels.
    """
    sizes = (
        *(getattr(module, name, 0) for name in ("in_features", "out_features")),
        *(getattr(module, name, 0) for name in ("in_channels", "out_channels")),
    )
    return path not in HEADS and any(sizes) and not any(size % _MULTIPLE for size in sizes)


def in_float8(model: nn.Module) -> nn.Module:
    """The same model, its layers in float8; convolutions as well, which torchao leaves."""
    for path, module in model.named_modules():
        if type(module) in _IN_FLOAT8 and takes_float8(module, path):
            module.__class__ = _IN_FLOAT8[type(module)]
    return model


class Float8Linear(nn.Linear):
    """``y = x Wᵀ + b``; the bias is added exactly."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = _rounded_backward(F.linear(_rounded(x), _rounded(self.weight)))
        return y if self.bias is None else y + self.bias


class Float8Conv2d(nn.Conv2d):
    """The same for a convolution."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = _rounded_backward(self._conv_forward(_rounded(x), _rounded(self.weight), None))
        return y if self.bias is None else y + self.bias[:, None, None]


_IN_FLOAT8: dict[type, type] = {nn.Linear: Float8Linear, nn.Conv2d: Float8Conv2d}


def round_to(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as its bytes in ``dtype`` say, the largest of which is ``t``'s largest."""
    most = torch.finfo(dtype).max
    scale = (most / t.abs().amax().double().clamp(min=_LEAST)).float()
    return ((t * scale).clamp(-most, most).to(dtype).float() * scale.reciprocal()).to(t.dtype)


# Operators, not autograd.Functions: Dynamo of torch 2.11 loses the gradient of what these round.
@torch.library.custom_op("hot_benchmarks::rounded", mutates_args=())
def _rounded(t: Tensor) -> Tensor:
    return round_to(t, torch.float8_e4m3fn)


@torch.library.custom_op("hot_benchmarks::rounded_backward", mutates_args=())
def _rounded_backward(t: Tensor) -> Tensor:
    return t.clone()


@torch.library.custom_op("hot_benchmarks::rounded_gradient", mutates_args=())
def _rounded_gradient(g: Tensor) -> Tensor:
    return round_to(g, torch.float8_e5m2)


for _operator in (_rounded, _rounded_backward, _rounded_gradient):
    _operator.register_fake(torch.empty_like)
_rounded.register_autograd(lambda _, g: g)
_rounded_backward.register_autograd(lambda _, g: _rounded_gradient(g))
