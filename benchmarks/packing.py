"""Storing a crossing tensor: plain operators that Inductor fuses, against our own kernels.

    python benchmarks/packing.py --device cuda --batch 256
    python benchmarks/packing.py --batch 8

Every tensor that ViT-B keeps for its backward is packed on its own, behind its producer (a
normalisation, a GELU: what Inductor can fuse and an operator cannot), and restored. ``compress_*``
and ``expand_int4`` are what layers' products use; they hold as many bytes. Rates count what must
move, each input read once and each output written once, against a copy measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tables
import torch
import typer
from kernels import EVICTION_BYTES, microseconds
from report import document, environment, publish
from step import Json
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage.pack import pack, unpack
from hot_compile.runtime.native import build

hot = torch.ops.hot
TOKENS = 197
WIDTHS = (768, 3072)
REPEATS = 9


@dataclass
class Row:
    """One way of doing one thing; ``bytes_needed`` is what it must move."""

    what: str
    way: str
    width: int
    bytes_needed: int
    microseconds: float


def packer(x: Tensor, scheme: Scheme) -> fx.GraphModule:
    """x -> its parts, by the nodes that the partitioner writes."""
    graph, given = _graph(x)
    graph.output_node().args = (pack(Emitter(graph, graph.output_node(), given), given, scheme),)
    return fx.GraphModule({}, graph)


def unpacker(x: Tensor, scheme: Scheme) -> fx.GraphModule:
    """x's parts -> x, by the nodes that the partitioner writes."""
    mode = FakeTensorMode()
    parts = packer(x, scheme)(x)
    graph = fx.Graph()
    given = [graph.placeholder(f"part{index}") for index in range(len(parts))]
    for node, part in zip(given, parts, strict=True):
        node.meta["val"] = mode.from_tensor(part)
    output = graph.output(())
    like = mode.from_tensor(x)
    output.args = (unpack(Emitter(graph, output, given[0]), tuple(given), like, scheme),)
    return fx.GraphModule({}, graph)


def _graph(x: Tensor) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = FakeTensorMode().from_tensor(x)
    graph.output(())
    return graph, given


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x-hat, a LayerNorm's output), as a ViT's forward computes them."""
    variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    centred = (x.float() - mean) * torch.rsqrt(variance + 1e-6)
    return centred, (centred * 1.5 + 0.5).to(x.dtype)


def activated(x: Tensor) -> tuple[Tensor, Tensor]:
    """(GELU's input, its output)."""
    return x, torch.nn.functional.gelu(x)


def ways(x: Tensor) -> dict[tuple[str, str], tuple[Callable[..., object], tuple[Tensor, ...]]]:
    """(what, way) -> function and operands."""
    store = {scheme: packer(x, scheme) for scheme in (Scheme.INT4, Scheme.INT8)}
    found: dict[tuple[str, str], tuple[Callable[..., object], tuple[Tensor, ...]]] = {}
    operators = {
        Scheme.INT4: lambda value: hot.compress_int4(value),
        Scheme.INT8: lambda value: hot.compress_int8(value, 0, 1),
    }
    for scheme, module in store.items():
        found["store alone", f"Inductor {scheme}"] = _compiled(module), (x,)
        found["store alone", f"operator {scheme}"] = operators[scheme], (x,)
        restore = _compiled(unpacker(x, scheme))
        found["restore", f"Inductor {scheme}"] = restore, tuple(module(x))
    found["restore", "operator int4"] = hot.expand_int4, hot.compress_int4(x)
    for name, producer in (("norm", normalised), ("gelu", activated)):
        found[name, "alone, nothing stored"] = _compiled(lambda v, p=producer: p(v)[1]), (x,)
        kept = producer(x)[0]
        fused = packer(kept, Scheme.INT4)

        def inductor(value: Tensor, p=producer, fused=fused) -> object:
            kept, out = p(value)
            return out, fused(kept)

        def operator(value: Tensor, p=producer) -> object:
            kept, out = p(value)
            return out, hot.compress_int4(kept)

        found[name, "then stored, Inductor int4"] = _compiled(inductor), (x,)
        found[name, "then stored, operator int4"] = _compiled(operator), (x,)
    return found


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


def measure(x: Tensor) -> list[Row]:
    """Every way of storing and restoring one tensor [rows, width]."""
    rows = []
    for (what, way), (function, operands) in ways(x).items():
        result = function(*operands)
        needed = _size(operands) + _size(result)
        spent = _time(lambda f=function, o=operands: f(*o), x.device)
        rows.append(Row(what, way, x.shape[1], needed, spent))
    return rows


def _size(nest: object) -> int:
    if isinstance(nest, Tensor):
        return nest.nbytes
    return sum(map(_size, nest))  # type: ignore[call-overload]


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Median microseconds, the device's cache filled with something else before."""
    if device.type == "cuda":
        evict = torch.empty(EVICTION_BYTES, dtype=torch.uint8, device=device)
        return microseconds(lambda _: call(), evict)
    spent = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:]) * 1e6


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2e6 * source.numel() / _time(lambda: target.copy_(source), device)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    batch: Annotated[int, typer.Option(help=f"samples of {TOKENS} tokens")] = 8,
    dtype: Annotated[str, typer.Option(help="of the tensors, a torch dtype")] = "",
    json_file: Json = None,
) -> list[Row]:
    """Measure ViT-B's tensors; bf16 on CUDA and fp32 on a CPU unless told otherwise."""
    where = torch.device(device)
    build.load(where.type)
    name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    torch.manual_seed(0)
    copy, rows = copy_rate(where), []
    for width in WIDTHS:
        x = torch.randn(batch * TOKENS, width, device=where, dtype=getattr(torch, name))
        rows += measure(x)
    title = f"ViT-B batch {batch}, {name}, {environment(where)['device']}"
    arguments = {"batch": batch, "dtype": name, "copy_bytes_per_second": copy}
    publish(tables.packing, document(where, arguments, rows), title, json_file)
    return rows


if __name__ == "__main__":
    typer.run(main)
