"""Backward time of single convolutions on a CPU: exact (oneDNN) against every strategy.

    python benchmarks/convs.py --shapes resnet50 --batch 8 --json convs.json
    python benchmarks/convs.py --forward   # y on INT8, as option forward="int8" computes it

A strategy's time is everything that HOT adds to, or puts in place of, both exact gradients: storing
x in the forward, quantising grad_output and the weight, both integer products, laying them out.
Tensors are channels last. Methods run interleaved within one process on fresh random inputs; the
figure is the median. ``plan`` is the cost model's prediction for ``int8``; below 1.05 a layer stays
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tables
import torch
import typer
from layers import Rounds, milliseconds
from report import document, publish
from torch import Tensor

from hot_compile.config import Strategy
from hot_compile.passes.base.site import Convolution
from hot_compile.passes.cost.conv import conv_gain, conv_times, shape_of
from hot_compile.passes.cost.devices import pricing
from hot_compile.passes.forward.convolution import ConvPrice, int8_convolution
from hot_compile.runtime.native import build
from hot_compile.runtime.reference.conv import tile_rows

hot = torch.ops.hot


@dataclass(frozen=True)
class Conv:
    """One square convolution, padded by half its kernel."""

    name: str
    size: int
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1


def _convs(name: str, *shapes: tuple[int, ...]) -> list[Conv]:
    return [Conv(name, *shape) for shape in shapes]


RESNET50 = _convs(
    "ResNet-50",
    (56, 256, 64, 1),
    (56, 64, 64, 3),
    (28, 512, 128, 1),
    (28, 128, 128, 3),
    (14, 256, 256, 3),
    (7, 512, 512, 3),
    (56, 128, 128, 3, 2),
    (14, 512, 512, 3, 2),
)
EFFICIENTFORMER_L7 = _convs(
    "EfficientFormer-L7",
    (56, 96, 384, 1),
    (28, 192, 768, 1),
    (14, 384, 1536, 1),
    (56, 96, 192, 3, 2),
    (28, 192, 384, 3, 2),
)
SHAPES = {
    "paper": RESNET50 + EFFICIENTFORMER_L7,  # the convolutions of tables 6 and 7
    "resnet50": RESNET50,
    "efficientformer-l7": EFFICIENTFORMER_L7,
}


@dataclass(frozen=True)
class Operands:
    """One convolution's tensors, channels last."""

    grad_output: Tensor
    x: Tensor
    weight: Tensor
    conv: Convolution

    @property
    def geometry(self) -> tuple[Any, ...]:
        """As the operators take it."""
        c = self.conv
        settings = (c.small_size, c.big_size, c.kernel, c.stride, c.padding, c.dilation)
        return (c.batch, *map(list, settings))

    def rows(self, tensor: Tensor) -> Tensor:
        """[positions, channels], a view."""
        return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def operands(layer: Conv, batch: int, dtype: torch.dtype, device: torch.device) -> Operands:
    """Random tensors for one layer."""
    padding, out = layer.kernel // 2, (layer.size - 1) // layer.stride + 1
    shapes = (
        (batch, layer.outputs, out, out),
        (batch, layer.inputs, layer.size, layer.size),
        (layer.outputs, layer.inputs, layer.kernel, layer.kernel),
    )
    g, x, w = (
        torch.randn(s, dtype=dtype, device=device).to(memory_format=torch.channels_last)
        for s in shapes
    )
    pair = [(n, n) for n in (out, layer.size, layer.kernel, layer.stride, padding, 1)]
    conv = Convolution(batch, pair[0], pair[1], layer.inputs, *pair[2:], False, True)
    return Operands(g, x, w, conv)


def exact(t: Operands) -> tuple[Tensor, Tensor]:
    """Both gradients as autograd computes them."""
    c = t.conv
    settings = ([*c.stride], [*c.padding], [*c.dilation], False, [0, 0], 1, [True, True, False])
    return torch.ops.aten.convolution_backward(t.grad_output, t.x, t.weight, None, *settings)[:2]


def _grad_x(t: Operands, row_q: Tensor, row_scale: Tensor) -> Tensor:
    columns = t.weight.permute(0, 2, 3, 1).reshape(t.weight.shape[0], -1)
    weight_q, weight_scale = hot.quantize_columns(columns, 16, 1, 8, True, False)
    pairs = (row_q, weight_q, row_scale, weight_scale)
    if t.conv.is_product:
        return hot.scaled_int_mm(*pairs, None, None, t.x.dtype)
    return hot.conv_grad_input(*pairs, *t.geometry, t.x.dtype)


def _grad_w(t: Operands, g: tuple[Tensor, ...], x: tuple[Tensor, ...], rank: int = 0) -> Tensor:
    operands = (g[0], x[0], g[1], x[1])
    if t.conv.is_product:
        return hot.scaled_int_mm(*operands, None, None, t.x.dtype)
    return hot.conv_grad_weight(*operands, *t.geometry, rank, t.x.dtype)


def int8(t: Operands) -> tuple[Tensor, Tensor]:
    """x stored in 8 bits; g_x [batch, height, width, I] and g_w [O, height, width, I]."""
    x_q, x_scale = hot.quantize_columns(t.rows(t.x), 0, 1, 8, True, False)
    grad = hot.quantize_grad(t.rows(t.grad_output), 8, True, 0, 1, True)
    return _grad_x(t, *grad[:2]), _grad_w(t, grad[2:], (x_q, x_scale))


def hla8(t: Operands) -> None:
    """g_w from the low-pass half of 4 x 4 tiles."""
    size = (t.conv.batch, t.conv.small_size)
    rows = t.rows(t.x)
    kept = (tile_rows(rows, *size), 8) if t.conv.is_product else (rows, 0)
    x_q, x_scale = hot.quantize_columns(*kept, 1, 8, True, False)
    g = t.rows(t.grad_output)
    _grad_x(t, *hot.quantize_rows(g, 8, True, True))
    grad = hot.quantize_columns(tile_rows(g, *size), 8, 1, 8, True, True)
    _grad_w(t, grad, (x_q, x_scale), 8)


METHODS: dict[str, Callable[[Operands], None]] = {
    "exact": exact,
    "hla8": hla8,
    "int8": int8,
}


def exact_forward(t: Operands) -> None:
    """y as PyTorch computes it."""
    c = t.conv
    torch.conv2d(t.x, t.weight, None, [*c.stride], [*c.padding])


def int8_forward(t: Operands) -> None:
    """y of both operands quantised."""
    int8_convolution(t.x, t.weight, None, torch.empty_like, t.conv, t.grad_output)


FORWARDS: dict[str, Callable[[Operands], None]] = {"exact": exact_forward, "int8": int8_forward}


@dataclass
class Timing(Rounds):
    """One convolution's figures."""

    layer: Conv
    predicted: float


def predicted_gain(t: Operands, forward: bool) -> float:
    """What the plan expects of ``int8``, or of an 8-bit forward, on this device."""
    rates = pricing(t.x.device)
    if isinstance(rates, str) or not rates.convolution:
        return 1.0
    kk, outputs = t.conv.offsets, t.grad_output.shape[1]
    rows = t.grad_output.numel() // outputs
    shape = shape_of(t.conv, rows, outputs, t.x.shape[1] * kk, t.x.element_size(), 8)
    dtype = str(t.x.dtype).removeprefix("torch.")
    if forward:
        return ConvPrice(rates, dtype, shape, t.conv).gain()
    return conv_gain(conv_times(Strategy.INT8, True, True, rates, dtype, t.conv), shape)


def measure(
    layer: Conv, batch: int, dtype: torch.dtype, device: torch.device, rounds: int, forward: bool
) -> Timing:
    """Times all methods, interleaved; the first of ``rounds + 1`` rounds warms up."""
    timing = None
    for number in range(rounds + 1):
        tensors = operands(layer, batch, dtype, device)
        timing = timing or Timing(layer, predicted_gain(tensors, forward))
        for name, method in (FORWARDS if forward else METHODS).items():
            spent = milliseconds(partial(method, tensors), device, 10 if number else 1)
            if number > 0:
                timing.add(name, spent)
    assert timing is not None
    return timing


def main(
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    batch: Annotated[int, typer.Option(help="samples")] = 8,
    shapes: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "paper",
    rounds: Annotated[int, typer.Option(help="timed rounds after one of warm-up")] = 5,
    forward: Annotated[bool, typer.Option("--forward", help="y, not the gradients")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> list[Timing]:
    """Measure, print a table, and write JSON on request."""
    if shapes not in SHAPES:
        raise typer.BadParameter(f"got {shapes!r}; expected one of {', '.join(SHAPES)}")
    build.load("cpu")
    torch.manual_seed(0)
    target = torch.device("cpu")
    timings = [
        measure(layer, batch, getattr(torch, dtype), target, rounds, forward)
        for layer in SHAPES[shapes]
    ]
    threads, side = torch.get_num_threads(), "forward" if forward else "backward"
    title = f"convolution {side}, cpu ({threads} threads), {dtype}, batch {batch}"
    arguments = {"title": title, "batch": batch, "dtype": dtype, "shapes": shapes, "side": side}
    said = document(target, arguments, timings)
    publish(tables.convs, said, f"{title}, torch {torch.__version__}", json_file)
    return timings


if __name__ == "__main__":
    typer.run(main)
