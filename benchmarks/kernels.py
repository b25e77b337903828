"""CUDA kernels one by one: bytes a second of the transforms, operations a second of the products.

    python benchmarks/kernels.py --json kernels.json

A transform's rate counts the bytes it must move, each input read once and each output written once,
against a device-to-device copy measured in the same run. A product stands beside bf16 torch.mm.
Inputs are random and evicted from, or rotated beyond, the L2 cache; the figure is the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tables
import torch
import typer
from report import publish, show
from torch import Tensor

from hot_compile.runtime.native import build

hot = torch.ops.hot
REPEATS = 15
EVICTION_BYTES = 256 << 20

TRANSFORM_SHAPES = [  # rows, columns, tokens: ViT-B at batch 128, Llama-7B at 8192 tokens
    (25216, 768, 197),
    (25216, 2304, 197),
    (25216, 3072, 197),
    (8192, 4096, 512),
    (8192, 11008, 512),
]
PRODUCT_SHAPES = {  # M, N, K
    "ViT-B qkv g_x": (25216, 768, 2304),
    "ViT-B proj g_x": (25216, 768, 768),
    "ViT-B fc1 g_x": (25216, 768, 3072),
    "ViT-B fc2 g_x": (25216, 3072, 768),
    "ViT-B qkv g_w half": (2304, 768, 12608),
    "ViT-B proj g_w half": (768, 768, 12608),
    "ViT-B fc1 g_w half": (3072, 768, 12608),
    "ViT-B fc2 g_w half": (768, 3072, 12608),
    "ViT-B qkv g_w": (2304, 768, 25216),
    "ViT-B proj g_w": (768, 768, 25216),
    "ViT-B fc1 g_w": (3072, 768, 25216),
    "ViT-B fc2 g_w": (768, 3072, 25216),
    "Llama q g_x": (8192, 4096, 4096),
    "Llama up g_x": (8192, 4096, 11008),
    "Llama down g_x": (8192, 11008, 4096),
    "Llama up g_w half": (11008, 4096, 4096),
    "Llama up g_w": (11008, 4096, 8192),
}


@dataclass
class Transform:
    """One operator on one shape; ``bytes_needed`` is what it must move."""

    name: str
    rows: int
    columns: int
    dtype: str
    bytes_needed: int
    microseconds: float


@dataclass
class Product:
    """One shape of scaled_int_mm and torch.mm in bf16, in microseconds."""

    name: str
    shape: tuple[int, int, int]
    microseconds: dict[str, float]


def microseconds(call: Callable[[int], object], evict: Tensor | None = None) -> float:
    """Median device time of ``call(i)``; ``evict`` is overwritten before each."""
    for i in range(3):
        call(i)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for i, (start, end) in enumerate(pairs):
        if evict is not None:
            evict.fill_(i)
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def copy_rate() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e6 * source.numel() / microseconds(lambda _: target.copy_(source))


def _size(value: object) -> int:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(t.numel() * t.element_size() for t in tensors)


def transforms(rows: int, columns: int, tokens: int, dtype: torch.dtype) -> list[Transform]:
    """Every transform on one gradient or activation of this shape."""
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    *_, fold, peak, _, _ = hot.quantize_one_read(x, 0, 1)
    *_, half_fold, half_peak, _, _ = hot.quantize_one_read(x, 8, tokens)
    whole, half = hot.compress_int8(x, 0, 1), hot.compress_int8(x, 8, tokens)
    weight = torch.randn(columns, 768, device="cuda", dtype=dtype)
    calls = {
        "quantize_one_read int4": (x, lambda _: hot.quantize_one_read(x, 0, 1)),
        "quantize_one_read fused, sums": (x, lambda _: hot.quantize_one_read(x, 0, 1, True, True)),
        "quantize_one_read hla8": (x, lambda _: hot.quantize_one_read(x, 8, tokens)),
        "quantize_columns HT16 of W (x 768)": (
            weight,
            lambda _: hot.quantize_columns(weight, 16, 1, 8, True, False),
        ),
        "compress_int8": (x, lambda _: hot.compress_int8(x, 0, 1)),
        "compress_int8 hla8": (x, lambda _: hot.compress_int8(x, 8, tokens)),
        "rescale_int8": (whole, lambda _: hot.rescale_int8(*whole, fold, peak)),
        "rescale_int8 hla8": (half, lambda _: hot.rescale_int8(*half, half_fold, half_peak)),
        "quantize_rows 4 bits": (x, lambda _: hot.quantize_rows(x, 4, True, True)),
        "quantize_columns plain": (x, lambda _: hot.quantize_columns(x, 0, 1, 8, True, False)),
        "quantize_columns HT16": (x, lambda _: hot.quantize_columns(x, 16, 1, 4, True, False)),
        "quantize_grad hla8": (x, lambda _: hot.quantize_grad(x, 4, True, 8, tokens, True)),
        "quantize_grad int4": (x, lambda _: hot.quantize_grad(x, 4, True, 0, 1, True)),
    }
    evict = torch.empty(EVICTION_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for name, (read, call) in calls.items():
        needed = _size(read) + _size(call(0))
        spent = microseconds(call, evict)
        found.append(Transform(name, rows, columns, str(dtype)[6:], needed, spent))
    return found


def product(name: str, shape: tuple[int, int, int]) -> Product:
    """Both integer products to bf16 (one with and without a rank-1 term, and to fp32), torch.mm."""
    m, n, k = shape
    copies = max(1, min(4, 1 + EVICTION_BYTES // (m * k + n * k)))  # past the L2 cache
    operands = [
        [torch.randint(-127, 128, (r, k), dtype=torch.int8, device="cuda") for r in (m, n)]
        for _ in range(copies)
    ]
    a_scale, b_scale = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")

    def integer(i: int, dtype: torch.dtype, *terms: Tensor | None) -> Tensor:
        return hot.scaled_int_mm(*operands[i % copies], a_scale, b_scale, *terms, dtype)

    spent = {
        "bf16": microseconds(lambda i: integer(i, torch.bfloat16, None, None)),
        "bf16 rank-1": microseconds(lambda i: integer(i, torch.bfloat16, a_scale, b_scale)),
        "fp32": microseconds(lambda i: integer(i, torch.float32, None, None)),
    }
    if "g_w" in name:
        spent["hadamard bf16"] = microseconds(
            lambda i: hot.hadamard_int_mm(
                operands[i % copies][0], a_scale, operands[i % copies][1], b_scale, m, False,
                torch.bfloat16,
            )
        )  # fmt: skip
    floats = [[t.bfloat16() for t in pair] for pair in operands]
    spent["torch.mm"] = microseconds(
        lambda i: torch.mm(floats[i % copies][0], floats[i % copies][1].t())
    )
    return Product(name, shape, spent)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> None:
    """Measure, print two tables, and write JSON on request."""
    build.load("cuda")
    torch.manual_seed(0)
    copy = copy_rate()
    moved = [t for s in TRANSFORM_SHAPES for t in transforms(*s, torch.bfloat16)]
    moved += transforms(*TRANSFORM_SHAPES[2], torch.float32)
    products = [product(name, shape) for name, shape in PRODUCT_SHAPES.items()]
    device = torch.cuda.get_device_name()
    facts = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    facts |= {"copy_bytes_per_second": copy, "transforms": [asdict(t) for t in moved]}
    facts |= {"products": [asdict(p) for p in products]}
    show(tables.transforms([facts]), f"transforms; copy {copy / 1e12:.2f} TB/s")
    publish(tables.products, facts, "scaled_int_mm", json_file)


if __name__ == "__main__":
    typer.run(main)
