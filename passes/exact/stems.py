"""Joint graph -> the same with strided first convolutions as dense ones over blocks of the image.

Three channels suit no tensor core: cuDNN pads them to eight and lays image and weight out anew.
With each block of stride x stride places as one place of so many times the channels, kernels move
by one and 43 % of what they multiply is zeros, not 62. On an H200 (bf16, batch 256) the 7 x 7 stem
of a ResNet-50 takes 0.65 ms that way in place of 1.77, its weight gradient 0.94 in place of 1.13.
Values differ by rounding alone: the same terms are added in another order.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.operators import SIXTEEN_BITS
from hot_compile.passes.exact.first_conv import (
    CHANNEL_MULTIPLE,
    backwards_of,
    slow_in_cudnn,
    wants_grad_input,
)
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD, each_dimension

_MOST_CHANNELS = 16
"""Of blocks: what was measured."""


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One dimension of the convolution, in elements of the image."""

    size: int
    kernel: int
    stride: int
    padding: int
    outputs: int

    @property
    def lead(self) -> int:
        """Zeros before the kernel, so that its windows begin where blocks do."""
        return -self.padding % self.stride

    @property
    def length(self) -> int:
        """The kernel's, in whole blocks."""
        return -(-(self.lead + self.kernel) // self.stride) * self.stride

    @property
    def kernel_border(self) -> tuple[int, int]:
        return self.lead, self.length - self.lead - self.kernel

    @property
    def image_border(self) -> tuple[int, int]:
        """What is added before and behind; behind, what no window reaches is cut off."""
        front = self.padding + self.lead
        return front, self.stride * (self.outputs - 1) + self.length - front - self.size


def applies(conv: fx.Node) -> bool:
    """A strided convolution of an image of few channels, which nobody wants the gradient of."""
    axes, backwards = _axes(conv), backwards_of(conv)
    if axes is None or not backwards or any(map(wants_grad_input, backwards)):
        return False
    overlap = any(axis.kernel > axis.stride for axis in axes)  # patches are products
    return overlap and value_of(conv.args[0]).shape[1] * axes[0].stride ** 2 <= _MOST_CHANNELS


def _axes(conv: fx.Node) -> list[_Axis] | None:
    """The convolution's axes, if it is one of images and strided alike, and its sizes are known."""
    settings: Any = conv.args[3:9]
    stride, padding, dilation, transposed, _, groups = settings
    (_, *sizes), kernel = value_of(conv.args[0]).shape, value_of(conv.args[1]).shape[2:]
    outputs = value_of(conv).shape[2:]
    if len(kernel) != 2 or transposed or groups != 1 or any(n != 1 for n in dilation):
        return None
    if not all(isinstance(n, int) for n in (*sizes, *outputs)):
        return None
    strides, paddings = each_dimension(stride, 2), each_dimension(padding, 2)
    if strides[0] != strides[1] or strides[0] == 1:
        return None
    return list(map(_Axis, sizes[1:], kernel, strides, paddings, outputs))


def pays(x: torch.Tensor, tf32: bool) -> str:
    """'' where cuDNN has no fast kernel for x's channels, but one for those of blocks."""
    if problem := slow_in_cudnn(x):
        return problem
    return "" if x.dtype in SIXTEEN_BITS else f"not measured in {x.dtype}"


def replace(graph: fx.Graph, conv: fx.Node) -> bool:
    """Give a strided convolution of an image, and its backward, the form over blocks."""
    x, weight, bias = conv.args[:3]
    axes, backwards = _axes(conv), backwards_of(conv)
    if axes is None:
        return False
    emit = Emitter(graph, conv, conv)
    image = _in_blocks(emit, x, axes, [axis.image_border for axis in axes])
    kernel = _in_blocks(emit, weight, axes, [axis.kernel_border for axis in axes])
    dense = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    y = emit(aten.convolution.default, image, kernel, bias, *dense)
    wanted = value_of(conv)
    if y.meta["val"].stride() != wanted.stride() and wanted.is_contiguous():
        y = emit(aten.clone.default, y, memory_format=torch.contiguous_format)
    conv.replace_all_uses_with(y)
    for backward in backwards:
        grad_output, _, _, bias_sizes, *_, mask = backward.args
        emit = Emitter(graph, backward, backward)
        if not value_of(grad_output).is_contiguous(memory_format=torch.channels_last):
            # as blocks are: else cuDNN lays it out anew
            grad_output = emit(aten.clone.default, grad_output, memory_format=torch.channels_last)
        new = emit(CONVOLUTION_BACKWARD, grad_output, image, kernel, bias_sizes, *dense, mask)
        for part in [user for user in backward.users if user.target is operator.getitem]:
            gradient = emit(operator.getitem, new, part.args[1])
            if part.args[1] == 1:
                gradient = _out_of_blocks(emit, gradient, value_of(weight), axes)
            part.replace_all_uses_with(gradient)
    return True


def _in_blocks(emit: Emitter, value: Any, axes: list[_Axis], borders: list[Any]) -> fx.Node:
    """[N, C, H, W] -> [N, stride^2 C and zeros, H / stride, W / stride], channels last."""
    stride, channels = axes[0].stride, value_of(value).shape[1]
    border = [n for front_and_back in reversed(borders) for n in front_and_back]
    value = emit(aten.constant_pad_nd.default, value, border, 0.0)
    count, (height, width) = emit.size(value, 0), value.meta["val"].shape[2:]
    shape = [count, channels, height // stride, stride, width // stride, stride]
    value = emit.permute(emit(aten.reshape.default, value, shape), [0, 2, 4, 3, 5, 1])
    block = stride * stride * channels
    shape = [count, height // stride, width // stride, block]
    value = emit(aten.reshape.default, value, shape)
    value = emit(aten.constant_pad_nd.default, value, [0, -block % CHANNEL_MULTIPLE], 0.0)
    return emit.permute(value, [0, 3, 1, 2])


def _out_of_blocks(
    emit: Emitter, gradient: fx.Node, like: torch.Tensor, axes: list[_Axis]
) -> fx.Node:
    """A weight's gradient, as ``_in_blocks`` laid the weight out -> ``like``'s shape."""
    outputs, channels = like.shape[:2]
    stride, (height, width) = axes[0].stride, (axis.length for axis in axes)
    gradient = emit.permute(gradient, [0, 2, 3, 1])
    gradient = emit(aten.slice.Tensor, gradient, 3, 0, stride * stride * channels)
    shape = [outputs, height // stride, width // stride, stride, stride, channels]
    gradient = emit.permute(emit(aten.reshape.default, gradient, shape), [0, 5, 1, 3, 2, 4])
    gradient = emit(aten.reshape.default, gradient, [outputs, channels, height, width])
    for dim, axis in enumerate(axes, start=2):
        gradient = emit(aten.slice.Tensor, gradient, dim, axis.lead, axis.lead + axis.kernel)
    return gradient
