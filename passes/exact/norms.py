"""Norms -> plain operators, forwards and backwards of which both read what the norm made.

Of a norm of groups torch's own backward reads the input as well: the gradient's product with that
is a sum that a rounded input leaves wrong, and both in 8 bits take the input's 16. By
``normalised = (input - mean) * rstd`` alone there is one tensor, and it tolerates rounding. As many
passes over memory.

On a CPU torch rounds the mean of a layer norm, and what it is divided by, to the input's dtype for
the backward alone, which so normalises anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import get_computation_dtype


def unrounded(layer_norm: Callable[..., Any]) -> Callable[..., Any]:
    """``layer_norm`` that returns mean and rstd as they are worked out."""

    def apart(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        if input.device.type == "cuda":  # they are
            return layer_norm(input, *args)  # type: ignore[no-any-return]
        out, *statistics = layer_norm(input.to(get_computation_dtype(input.dtype)), *args)
        return out.to(input.dtype), *statistics

    return apart


def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None,
    n: int, channels: int, positions: int, groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output as ``input`` [n, channels, ...]; mean and rstd, [n, groups] in fp32 or fp64)."""
    wide = input.to(get_computation_dtype(input.dtype))
    grouped = wide.reshape(n, groups, channels // groups, positions)
    var, mean = torch.var_mean(grouped, dim=(2, 3), unbiased=False)
    rstd = torch.rsqrt(var + eps)
    out = _normalised(wide, mean, rstd)
    out = out if weight is None else out * _by_channel(weight, wide)
    out = out if bias is None else out + _by_channel(bias, wide)
    return out.to(input.dtype), mean, rstd


def group_norm_backward(
    grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor | None,
    n: int, channels: int, positions: int, groups: int, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of input, weight and bias, as far as ``output_mask`` asks for them."""
    dtype = get_computation_dtype(input.dtype)
    mean, rstd, grad = (x.to(dtype) for x in (mean, rstd, grad_output))
    normalised = _normalised(input.to(dtype), mean, rstd)
    along, plain = (_over_positions(x) for x in (grad * normalised, grad))  # [n, channels]
    grad_input = None
    if output_mask[0]:
        weighted = grad if gamma is None else grad * _by_channel(gamma.to(dtype), input)
        sums = [x if gamma is None else x * gamma for x in (along, plain)]
        elements = channels // groups * positions
        share, offset = (_of_channels(_of_groups(x, groups) / elements, input) for x in sums)
        grad_input = (weighted - normalised * share - offset) * _of_channels(rstd, input)
        grad_input = grad_input.to(input.dtype)
    of = input.dtype if gamma is None else gamma.dtype
    grad_weight = along.sum(0).to(of) if output_mask[1] else None
    grad_bias = plain.sum(0).to(of) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


def _normalised(wide: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """In the image's own shape, in which it is stored as it lies in memory."""
    return (wide - _of_channels(mean, wide)) * _of_channels(rstd, wide)


def _of_channels(x: Tensor, like: Tensor) -> Tensor:
    """What groups have, [n, groups], to broadcast with ``like`` [n, channels, ...]."""
    spread = x.unsqueeze(2).expand(*x.shape, like.shape[1] // x.shape[1])
    return _by_channel(spread.reshape(like.shape[:2]), like)


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    """``x`` [..., channels] to broadcast with ``like`` [n, channels, ...]."""
    return x.reshape(*x.shape, *(1,) * (like.dim() - 2))


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Sums over the channels, [n, channels], of a group."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups).sum(2)


def _over_positions(x: Tensor) -> Tensor:
    return x.sum(tuple(range(2, x.dim()))) if x.dim() > 2 else x
