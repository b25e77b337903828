"""Instructions an element takes where storage packs and restores on a GPU; needs none itself.

    python benchmarks/instructions.py
    python benchmarks/instructions.py --schemes groups6,rows8 --columns 768 --capability 80

On an H200 these kernels are bound by arithmetic: they take about elements times instructions by 3e7
microseconds. Inductor writes Triton for a pretended device, Triton and its own ptxas compile that,
and its own cuobjdump lists the outcome. Counted are kernels without loops, each instruction as one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from report import show, write_json
from step import Json
from tables import Lines
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.exact.functions import shorten_functions
from hot_compile.passes.storage.pack import pack, unpack
from hot_compile.runtime.planes import RESTORED_OPERATIONS

WARPS = 4
COUNTED = "instructions an element"
Body = Callable[..., tuple[fx.Node, ...]]
"""Makes a graph's results from its inputs: (emit, *inputs) -> results."""
HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


@dataclass
class Row:
    """One kernel; ``instructions`` an element, None if it loops."""

    what: str
    scheme: str
    kernel: str
    instructions: float | None


class PretendedDriver:
    """What Inductor asks Triton's driver for."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def __getattr__(self, name: str) -> Any:
        return mock.MagicMock()


@contextlib.contextmanager
def pretended(capability: int) -> Iterator[GPUTarget]:
    """Inside, torch and Triton believe that there is a GPU of this compute capability."""
    target, version = GPUTarget("cuda", capability, 32), divmod(capability, 10)
    device = SimpleNamespace(
        name="pretended",
        major=version[0],
        minor=version[1],
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=2**36,
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": device,
        "get_device_capability": version,
        "_get_device_properties": device,
        "_lazy_init": None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            double = mock.MagicMock(return_value=answer)
            stack.enter_context(mock.patch.object(torch.cuda, name, double, create=True))
        for module in ("torch._inductor.scheduler", "torch.utils._triton"):
            stack.enter_context(mock.patch(f"{module}.has_triton", return_value=True))
        as_ours = {"force_disable_caches": True, "realize_opcount_threshold": RESTORED_OPERATIONS}
        stack.enter_context(config.patch(as_ours))
        driver = PretendedDriver(target)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        yield target


def written(inputs: list[Tensor], body: Body) -> str:
    """Inductor's code of the graph that ``body(emit, *inputs)`` makes."""
    graph, given = fx.Graph(), []
    for number, value in enumerate(inputs):
        given.append(graph.placeholder(f"p{number}"))
        given[-1].meta["val"] = value
    end = graph.output(())
    end.args = (body(Emitter(graph, end, given[0]), *given),)
    shorten_functions(graph)
    mode = inputs[0].fake_mode  # type: ignore[attr-defined]
    lowering = GraphLowering(
        fx.GraphModule({}, graph), example_inputs=inputs, shape_env=mode.shape_env
    )
    handlers = (V.set_graph_handler(lowering), V.set_fake_mode(mode))
    with handlers[0], handlers[1], V.set_debug_handler(mock.MagicMock()):
        lowering.run(*inputs)
        return str(lowering.codegen()[0].value)


def packing(scheme: Scheme, parts: list[Tensor]) -> Body:
    """Body: x -> what ``scheme`` makes of it; their fake values go to ``parts``."""

    def body(emit: Emitter, x: fx.Node) -> tuple[fx.Node, ...]:
        nodes = pack(emit, x, scheme)
        parts.extend(node.meta["val"] for node in nodes)
        return nodes

    return body


def restore(scheme: Scheme, like: Tensor) -> Body:
    """Body: (what ``scheme`` packs, g) -> GELU's gradient and GELU."""

    def body(emit: Emitter, *given: fx.Node) -> tuple[fx.Node, ...]:
        *parts, g = given
        x = emit.cast(unpack(emit, tuple(parts), like, scheme), torch.float32)
        scaled = emit(aten.mul.Tensor, x, 0.5**0.5)
        cdf = emit(aten.add.Tensor, emit(aten.erf.default, scaled), 1.0)
        cdf = emit(aten.mul.Tensor, cdf, 0.5)
        exponent = emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, x), -0.5)
        density = emit(aten.mul.Tensor, emit(aten.exp.default, exponent), 0.3989422804014327)
        slope = emit(aten.add.Tensor, cdf, emit(aten.mul.Tensor, x, density))
        gradient = emit(aten.mul.Tensor, emit.cast(g, torch.float32), slope)
        results = gradient, emit(aten.mul.Tensor, x, cdf)
        return tuple(emit.cast(result, like.dtype) for result in results)

    return body


def kernels(code: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(name, source, types of arguments) of every Triton kernel in Inductor's code."""
    for match in re.finditer(r"@triton\.jit\ndef (\w+)\(.*?(?=\n''')", code, flags=re.DOTALL):
        signature = re.findall(r"'signature': \{(.*?)\}", code[: match.start()])[-1]
        yield match[1], match[0], dict(re.findall(r"'(\w+)': '([^']+)'", signature))


def compiled(
    name: str,
    source: str,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    target: GPUTarget,
    warps: int = WARPS,
) -> bytes:
    """The kernel's cubin. ``constants``: sizes of its blocks, as Inductor's autotuning tries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(HEAD + source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        names = getattr(module, name).arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        places = [n for n, kind in enumerate(signature.values()) if kind != "constexpr"]
        ast = ASTSource(
            getattr(module, name),
            signature,
            constexprs={key: n for key, n in constants.items() if key in signature},
            attrs={(n,): [["tt.divisibility", 16]] for n in places},
        )
        return bytes(triton.compile(ast, target, {"num_warps": warps}).asm["cubin"])


def instructions(cubin: bytes) -> int:
    """How many a thread runs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run(
            [str(tool), "-sass", file.name], capture_output=True, text=True, check=True
        )
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", listed.stdout, flags=re.MULTILINE))


def count(what: str, scheme: Scheme, code: str, elements: int, target: GPUTarget) -> list[Row]:
    """A row for every kernel in Inductor's code."""
    rows = []
    for name, source, types in kernels(code):
        if "R0_BLOCK" in types:
            rows.append(Row(what, str(scheme), name, None))
            continue
        programs = int(re.findall(r"xnumel = (\d+)", source)[0])
        block = max(1, 1024 * programs // elements)
        each = block * elements / programs / (32 * WARPS)
        total = instructions(compiled(name, source, types, {"XBLOCK": block}, target))
        rows.append(Row(what, str(scheme), name, round(total / each, 1)))
    return rows


def main(
    schemes: Annotated[str, typer.Option(help="comma-separated")] = "groups6,groups8,groups12",
    rows: Annotated[int, typer.Option(help="of the stored tensor")] = 50432,
    columns: Annotated[int, typer.Option(help="likewise")] = 3072,
    capability: Annotated[int, typer.Option(help="compute capability, times ten")] = 90,
    json_file: Json = None,
) -> list[Row]:
    """Count the instructions of kernels that pack and restore a bf16 tensor."""
    found: list[Row] = []
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for scheme in map(Scheme, schemes.split(",")):
        parts: list[Tensor] = []
        with pretended(capability) as target:
            code = written([x], packing(scheme, parts))
            found += count("packing", scheme, code, x.numel(), target)
            code = written([*parts, x], restore(scheme, x))
            found += count("GELU's backward", scheme, code, x.numel(), target)
    lines = [(row.what, row.scheme, str(row.instructions or "it loops")) for row in found]
    arguments = {"rows": rows, "columns": columns, "capability": capability}
    tell([("kernel that", "scheme", COUNTED), *lines], arguments, found, json_file)
    return found


def tell(lines: Lines, arguments: dict[str, int], found: list[Any], json_file: Path | None) -> None:
    """Print ``lines``; write what was ``found`` to a file if one is named."""
    show(lines, f"compute capability {arguments['capability'] / 10}")
    if json_file:
        write_json(json_file, torch.device("cpu"), arguments, found)


if __name__ == "__main__":
    typer.run(main)
