"""Instructions an element takes where a kernel of Inductor's quantises the gradient that it makes.

    python benchmarks/gradient_rows.py
    python benchmarks/gradient_rows.py --rows 8192 --columns 2048

What ``quantize_one_read`` does in a kernel of its own (docs/adr/0005): INT8 rows with a scale each,
columns made equal before, a bias's sums on the way; what is left is to transpose bytes. Beside it
the kernel that only makes the gradient. Needs no GPU, as ``instructions.py``. docs/adr/0027 says
what followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from instructions import (
    COUNTED,
    WARPS,
    Body,
    compiled,
    instructions,
    kernels,
    packing,
    pretended,
    restore,
    tell,
    written,
)
from step import Json
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

from hot_compile.passes.base.emit import Emitter, prims
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.schemes import Scheme
from hot_compile.runtime.planes import WHOLE
from hot_compile.runtime.reference.arithmetic import MIX_HASH

LEVELS, MIX = 127, MIX_HASH - 2**32
"""Of INT8, and what hashes the bits that are added before rounding (docs/adr/0002), as int32."""
TILE, BLOCK, ROW_WARPS = 64, 1024, 8


@dataclass
class Row:
    """One kernel."""

    producer: str
    what: str
    kernel: str
    instructions: float


def quantised(emit: Emitter, gradient: fx.Node, equal: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes: INT8 [L, O] of bf16 ``gradient``, rows' largest, sums of columns, INT8 [O, L]."""
    size = gradient.meta["val"].shape
    values = emit.cast(gradient, torch.float32)
    even = emit(aten.mul.Tensor, values, equal)
    peak = emit(aten.amax.default, emit(aten.abs.default, even), [-1], True)
    factor = emit(aten.reciprocal.default, emit(aten.clamp_min.default, peak, 1e-30))
    shifted = emit(aten.mul.Tensor, even, emit(aten.mul.Tensor, factor, LEVELS * 256.0))
    bits = emit(aten.view.dtype, emit(aten.add.Tensor, shifted, WHOLE), torch.int32)
    place = emit(
        prims.iota.default, size.numel(), start=0, step=1, dtype=torch.int32,
        device=gradient.meta["val"].device, requires_grad=False,
    )  # fmt: skip
    place = emit(aten.view.default, place, list(size))
    mixed = emit(aten.mul.Tensor, emit(aten.bitwise_xor.Tensor, bits, place), MIX)
    dither = emit(aten.bitwise_right_shift.Tensor_Scalar, mixed, 24)
    whole = emit(aten.add.Tensor, bits, emit(aten.bitwise_and.Scalar, dither, 255))
    q = emit.cast(emit(aten.bitwise_right_shift.Tensor_Scalar, whole, 8), torch.int8)
    sums = emit(aten.sum.dim_IntList, values, [0], True)
    turned = emit(aten.permute.default, q, [1, 0])
    return q, peak, sums, emit(aten.clone.default, turned, memory_format=torch.contiguous_format)


def count(
    producer: str, what: str, inputs: list[Tensor], body: Body, elements: int, target: GPUTarget
) -> list[Row]:
    """A row for every kernel that Inductor makes of ``body``."""
    rows = []
    for name, source, types in kernels(written(inputs, body)):
        row = re.search(r"r0_numel = (\d+)", source)
        if row is not None:  # one row at a time, all of it in registers
            constants, each, warps = {"XBLOCK": 1}, int(row[1]), ROW_WARPS
        elif "YBLOCK" in source:
            constants, each, warps = {"XBLOCK": TILE, "YBLOCK": TILE}, TILE * TILE, WARPS
        else:
            constants, each, warps = {"XBLOCK": BLOCK}, BLOCK, WARPS
        constants |= {"R0_BLOCK": BLOCK, "RSPLIT_SIZE": 64, "NUM_STAGES": 1}
        total = instructions(compiled(name, source, types, constants, target, warps))
        rows.append(Row(producer, what, name, round(total * 32 * warps / each, 1)))
    return rows


def main(
    rows: Annotated[int, typer.Option(help="of the gradient")] = 50432,
    columns: Annotated[int, typer.Option(help="likewise")] = 3072,
    capability: Annotated[int, typer.Option(help="compute capability, times ten")] = 90,
    json_file: Json = None,
) -> list[Row]:
    """Count instructions of kernels that make a bf16 gradient, and that quantise it as well."""
    mode, parts = FakeTensorMode(shape_env=ShapeEnv()), list[Tensor]()
    with mode:
        like = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        equal = torch.empty(columns, device="cuda")

    def copied(emit: Emitter, g: fx.Node) -> tuple[fx.Node, ...]:
        doubled = emit(aten.mul.Tensor, emit.cast(g, torch.float32), 2.0)
        return (emit.cast(doubled, torch.bfloat16),)

    found: list[Row] = []
    with pretended(capability) as target:
        written([like], packing(Scheme.GROUPS6, parts))
        producers = {"a copy": (copied, [like])}
        producers["GELU's backward"] = (restore(Scheme.GROUPS6, like), [*parts, like])
        for name, (make, inputs) in producers.items():

            def both(emit: Emitter, *given: fx.Node, make: Body = make) -> tuple[fx.Node, ...]:
                *own, factors = given
                gradient, *others = make(emit, *own)
                return *quantised(emit, gradient, factors), *others

            found += count(name, "as it is", inputs, make, like.numel(), target)
            found += count(name, "quantised", [*inputs, equal], both, like.numel(), target)
    lines = [(row.producer, row.what, row.kernel, str(row.instructions)) for row in found]
    arguments = {"rows": rows, "columns": columns, "capability": capability}
    tell([("made by", "gradient", "kernel", COUNTED), *lines], arguments, found, json_file)
    return found


if __name__ == "__main__":
    typer.run(main)
