"""Backward time of single layers: exact products against every strategy.

    python benchmarks/layers.py --shapes vit-b --batch 8
    python benchmarks/layers.py --device cuda --dtype bfloat16 --shapes paper --json layers.json
    python benchmarks/layers.py --device cuda --shapes paper --batch 1 --graph

A strategy's time is everything that HOT adds to, or puts in place of, the two exact products:
quantising x, grad_output and the weight, both integer products with their epilogues. What is timed
is the very function that is made into a graph's nodes.
Methods run interleaved within one process on fresh random inputs; the figure is the median. With
``--graph`` every method, exact too, is captured in a CUDA graph and replayed: what a layer costs
within a captured step, where the host's calls cost nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tables
import torch
import typer
from report import publish
from torch import Tensor

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.cost.devices import pricing
from hot_compile.passes.cost.linear import Rates, Shape, predicted_gain
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.runtime.native import build


@dataclass(frozen=True)
class Layer:
    """One layer's backward: ``length`` rows per sample, O outputs, I inputs."""

    name: str
    length: int
    outputs: int
    inputs: int


def _layers(name: str, *shapes: tuple[int, int, int]) -> list[Layer]:
    return [Layer(name, *shape) for shape in shapes]


RESNET50 = _layers(
    "ResNet-50",
    (3136, 64, 256),
    (3136, 64, 576),
    (784, 128, 512),
    (784, 128, 1152),
    (196, 256, 2304),
    (49, 512, 4608),
)
VIT_B = _layers("ViT-B", (197, 2304, 768), (197, 768, 768), (197, 3072, 768), (197, 768, 3072))
EFFICIENTFORMER_L7 = _layers(
    "EfficientFormer-L7",
    (3136, 384, 96),
    (784, 768, 192),
    (196, 1536, 384),
    (49, 1536, 768),
    (49, 768, 1024),
    (49, 3072, 768),
)
LLAMA_7B = _layers("Llama-7B", (8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 11008))
SHAPES = {
    "paper": RESNET50 + VIT_B + EFFICIENTFORMER_L7,  # tables 5 to 7 of the supplementary
    "resnet50": RESNET50,
    "vit-b": VIT_B,
    "efficientformer-l7": EFFICIENTFORMER_L7,
    "llama-7b": LLAMA_7B,  # 8192 tokens in all: run with --batch 1
}


@dataclass(frozen=True)
class Operands:
    """One layer's tensors: grad_output [L, O], weight [O, I], x [L, I]."""

    grad_output: Tensor
    weight: Tensor
    x: Tensor


METHODS = {str(s): s for s in STRATEGIES if s is Strategy.EXACT or STRATEGIES[s].quantises_x}
"""What is timed."""


def how_of(method: Strategy, dtype: torch.dtype, tokens: int, one_read: bool) -> How:
    """What ``method``'s function is told where the device's rates say ``one_read``."""
    spec = STRATEGIES[method]
    return How(
        dtype=dtype,
        rank=8 if spec.low_rank else 0,
        tokens=tokens if spec.grouped else 1,
        one_read=one_read and spec.one_read,
    )


def backward(method: Strategy, t: Operands, how: How) -> None:
    """Both gradients by ``method``, as autograd computes them where it leaves the exact product."""
    found = STRATEGIES[method](t.grad_output, t.x, t.weight, how)
    _ = t.grad_output @ t.weight if found.gx is None else found.gx
    _ = t.grad_output.t() @ t.x if found.gw is None else found.gw


@dataclass(kw_only=True)
class Rounds:
    """Milliseconds of each method, one entry a round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, method: str, spent: float) -> None:
        """One more round of ``method``, in milliseconds."""
        self.rounds.setdefault(method, []).append(spent)

    def median(self, method: str) -> float:
        """Milliseconds."""
        return statistics.median(self.rounds[method])


@dataclass
class Timing(Rounds):
    """One layer's figures."""

    layer: Layer
    rows: int
    planned: str
    """What the planner chooses of ``int8`` and exact, with the gain that it predicts for int8."""


def milliseconds(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Milliseconds of one call, of ``repeats`` in a row."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) * 1e3 / repeats


def captured(call: Callable[[], None], repeats: int) -> Callable[[], None]:
    """Replays a CUDA graph of ``repeats`` calls in a row."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph.replay


def random_operands(layer: Layer, rows: int, dtype: torch.dtype, device: torch.device) -> Operands:
    """Gaussian tensors of the layer's shapes."""
    shapes = ((rows, layer.outputs), (layer.outputs, layer.inputs), (rows, layer.inputs))
    return Operands(*(torch.randn(s, dtype=dtype, device=device) for s in shapes))


def measure(
    layer: Layer,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    graph: bool = False,
) -> Timing:
    """Times all methods on one layer, interleaved; the first of ``rounds + 1`` rounds warms up.

    ``graph``: as CUDA graphs, captured once and given fresh numbers every round.
    """
    rows = batch * layer.length
    tokens = layer.length if batch % 16 == 0 else 1  # hla8 groups across the batch when it can
    rates = pricing(device)
    if isinstance(rates, str):
        raise typer.BadParameter(rates)
    timing = Timing(layer, rows, planned(layer, rows, dtype, rates))
    repeats = 10 if device.type == "cuda" else 1
    operands = random_operands(layer, rows, dtype, device)
    hows = {name: how_of(m, dtype, tokens, rates.one_read) for name, m in METHODS.items()}
    calls = {n: partial(backward, m, operands, hows[n]) for n, m in METHODS.items()}
    if graph:
        calls = {name: captured(call, repeats) for name, call in calls.items()}
    for number in range(rounds + 1):
        for tensor in (operands.grad_output, operands.weight, operands.x):
            tensor.normal_()
        for name, call in calls.items():
            once = milliseconds(call, device, 1 if graph else repeats)
            if number > 0:
                timing.add(name, once / repeats if graph else once)
    return timing


def planned(layer: Layer, rows: int, dtype: torch.dtype, rates: Rates) -> str:
    """What the planner chooses for this layer of recipe ``hot``'s products and exact."""
    shape = Shape(rows, layer.outputs, layer.inputs, dtype.itemsize)
    name = str(dtype).removeprefix("torch.")
    how = how_of(Strategy.INT8, dtype, 1, rates.one_read)
    gain = predicted_gain(Strategy.INT8, how, rates, name, shape)
    return f"{'int8' if gain >= HotConfig().min_gain else 'exact'} ({gain:.2f})"


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    batch: Annotated[int, typer.Option(help="samples; rows = samples x length")] = 8,
    shapes: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "vit-b",
    rounds: Annotated[int, typer.Option(help="timed rounds after one of warm-up")] = 9,
    graph: Annotated[bool, typer.Option(help="replay captured CUDA graphs")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> None:
    """Measure, print a table, and write JSON on request."""
    if shapes not in SHAPES:
        raise typer.BadParameter(f"got {shapes!r}; expected one of {', '.join(SHAPES)}")
    if graph and device != "cuda":
        raise typer.BadParameter("got --graph on a CPU; CUDA graphs want --device cuda")
    build.load(device)
    torch.manual_seed(0)
    target = torch.device(device)
    timings = [
        measure(layer, batch, getattr(torch, dtype), target, rounds, graph)
        for layer in SHAPES[shapes]
    ]
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    way = "captured graphs, " if graph else ""
    title = (
        f"layer backward, {way}{device} ({where}), {dtype}, batch {batch}, "
        f"torch {torch.__version__}"
    )
    facts = {"title": title, "layers": [asdict(t) for t in timings]}
    publish(tables.layers, facts, title, json_file)


if __name__ == "__main__":
    typer.run(main)
