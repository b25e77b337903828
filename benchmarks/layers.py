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

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tables
import torch
import typer
from report import environment, publish
from torch import Tensor

from hot_compile.config import Strategy
from hot_compile.passes.cost.devices import pricing
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.runtime.native import build

LAYERS = {
    "resnet50": [
        (3136, 64, 256), (3136, 64, 576), (784, 128, 512), (784, 128, 1152), (196, 256, 2304),
        (49, 512, 4608),
    ],
    "vit-b": [(197, 2304, 768), (197, 768, 768), (197, 3072, 768), (197, 768, 3072)],
    "efficientformer-l7": [
        (3136, 384, 96), (784, 768, 192), (196, 1536, 384), (49, 1536, 768), (49, 768, 1024),
        (49, 3072, 768),
    ],
    "llama-7b": [(8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 11008)],
}  # fmt: skip
"""By model: rows a sample, outputs, inputs. Llama's are 8192 tokens in all: ``--batch 1``."""
SHAPES = {
    **{name: [(name, *shape) for shape in shapes] for name, shapes in LAYERS.items()},
    "paper": [(n, *s) for n in LAYERS for s in LAYERS[n] if n != "llama-7b"],
}
"""``paper``: tables 5 to 7 of the supplementary."""
METHODS = {str(s): s for s in STRATEGIES if s is Strategy.EXACT or STRATEGIES[s].quantises_x}
"""What is timed."""


def backward(method: Strategy, g: Tensor, w: Tensor, x: Tensor, how: How) -> None:
    """Both gradients by ``method``, as autograd computes them where it leaves the exact product."""
    found = STRATEGIES[method](g, x, w, how)
    _ = g @ w if found.gx is None else found.gx
    _ = g.t() @ x if found.gw is None else found.gw


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


def measure(
    sizes: tuple[int, int, int],
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    graph: bool = False,
) -> dict[str, list[float]]:
    """Milliseconds of all methods on one layer, interleaved, a round an entry; one more warms up.

    ``graph``: as CUDA graphs, captured once and given fresh numbers every round.
    """
    length, outputs, inputs = sizes
    rates = pricing(device)
    if isinstance(rates, str):
        raise typer.BadParameter(rates)
    tokens = length if batch % 16 == 0 else 1  # hla8 groups across the batch when it can
    rows, repeats = batch * length, 10 if device.type == "cuda" else 1
    shapes = (rows, outputs), (outputs, inputs), (rows, inputs)
    operands = [torch.empty(shape, dtype=dtype, device=device).normal_() for shape in shapes]
    calls: dict[str, Callable[[], None]] = {}
    for name, method in METHODS.items():
        spec = STRATEGIES[method]
        how = How(
            dtype=dtype,
            rank=8 if spec.low_rank else 0,
            tokens=tokens if spec.grouped else 1,
            one_read=rates.one_read and spec.one_read,
        )
        call = partial(backward, method, *operands, how)
        calls[name] = captured(call, repeats) if graph else call
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for tensor in operands:
            tensor.normal_()
        for name, call in calls.items():
            once = milliseconds(call, device, 1 if graph else repeats)
            found[name].append(once / repeats if graph else once)
    return {name: times[1:] for name, times in found.items()}


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
    where, timed = torch.device(device), list[dict[str, Any]]()
    for name, length, outputs, inputs in SHAPES[shapes]:
        times = measure(
            (length, outputs, inputs), batch, getattr(torch, dtype), where, rounds, graph
        )
        layer = {"name": name, "outputs": outputs, "inputs": inputs}
        timed.append({"layer": layer, "rows": batch * length, "rounds": times})
    facts = environment(where)
    way = "captured graphs, " if graph else ""
    title = f"layer backward, {way}{facts['device']}, {dtype}, batch {batch}"
    said = {"title": title, "environment": facts, "layers": timed}
    publish(tables.layers, said, title, json_file)


if __name__ == "__main__":
    typer.run(main)
