"""Lowers hot's graphs for a GPU that is not here, to the source of kernels that Triton can compile.

    python tests/absent_gpu.py 'timm:efficient*,torch:*'  # names of benchmarks/zoo_models.py
    python tests/absent_gpu.py --kernels                  # some blocks; and Triton compiles for it

A step is traced on the CPU with fake tensors; its joint graph is moved to a GPU before any of hot's
passes; Inductor then schedules it and writes Triton's code as on a GPU; nor does Triton need one to
compile that. Nothing runs. What the process believes of its devices is changed for good: it is to
be a process of its own. A line of JSON for each model says what came of its graphs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=80 << 30, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=232448, gcnArchName="", is_integrated=False,
)  # fmt: skip
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
Model = Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]]
"""Makes a model, and what gives its loss through a compiled form of it."""


class Lowered(Exception):
    """There is code, which nothing here can run."""


class _Visible:
    """Whether there is a GPU: only Inductor is to see it, for Dynamo asks it for its seeds."""

    now = False


class _Device(contextlib.nullcontext[None]):
    """For ``torch.cuda.device``, which isinstance is asked about."""

    def __init__(self, _: Any) -> None:
        super().__init__()


def pretend(kernels: bool, written: Callable[[str], object] = lambda _: None) -> None:
    """Have torch and Triton believe in a GPU, in this process, from now on.

    ``kernels``: Triton compiles what Inductor writes. ``written`` is called with each graph's code.
    """
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, config, decomposition, scheduler, utils  # noqa: F401
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    answers: dict[str, Any] = {
        "is_available": lambda: _Visible.now,
        "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda _: None, "synchronize": lambda *_: None, "_lazy_init": lambda: None,
        "get_device_properties": lambda *_: H100, "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True, "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None, "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0, "device": _Device,
    }  # fmt: skip
    interface: Any = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        setattr(interface, name, staticmethod(answer))
    interface.get_compute_capability = staticmethod(lambda *_: 90)
    interface.is_triton_capable = staticmethod(lambda *_: True)
    interface.raise_if_triton_unavailable = staticmethod(lambda *_: None)
    interface.Worker.get_device_properties = staticmethod(lambda *_: H100)
    interface.Worker.current_device = staticmethod(lambda: 0)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and hasattr(module, "has_triton"):
            module.has_triton = lambda *_, **__: True  # type: ignore[attr-defined]
    utils.get_gpu_shared_memory = lambda: H100.shared_memory_per_block_optin  # type: ignore[assignment]
    triton.runtime.driver.set_active(
        types.SimpleNamespace(  # type: ignore[arg-type]
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
            get_active_torch_device=lambda: GPU, get_current_stream=lambda *_: 0,
            get_device_interface=lambda: torch.cuda,
        )
    )  # fmt: skip
    triton_helpers.set_driver_to_gpu = lambda: None
    # measurements are what a GPU would be needed for
    config.force_disable_caches, config.compile_threads = True, 1
    config.joint_graph_constant_folding = config.shape_padding = False
    decomposition.decompositions[aten.native_group_norm.default] = _group_norm
    decomposition.fast_random_decomps.cache_clear()
    _Views.watch()
    for name in ("_compile_to_module", "compile_to_module", "compile_to_fn"):
        setattr(GraphLowering, name, functools.partialmethod(_write, kernels, written))


def _group_norm(x: Tensor, weight: Any, bias: Any, *sizes: Any) -> tuple[Tensor, ...]:
    """As torch decomposes it on a GPU: in the groups' shape, and by channel only then."""
    out, mean, rstd = torch._refs.native_group_norm(x.float(), None, None, *sizes)
    for vector, step in ((weight, torch.mul), (bias, torch.add)):
        if vector is not None:
            out = step(out, vector.reshape(-1, *[1] * (x.dim() - 2)))
    return out.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


class _Views:
    """Views of memory that Inductor made: (buffer, its strides as the view was made)."""

    made: ClassVar[list[tuple[Any, list[Any]]]] = []

    @classmethod
    def watch(cls) -> None:
        """Note each."""
        from torch._inductor import ir

        own = ir.ReinterpretView.__post_init__

        def noted(view: Any) -> None:
            own(view)
            base = view.data
            while not isinstance(base, ir.Buffer):
                base = base.data
            cls.made.append((base, _strides(base)))

        ir.ReinterpretView.__post_init__ = noted  # type: ignore[method-assign]

    @classmethod
    def stale(cls) -> list[str]:
        """Buffers that are not laid out as a view of theirs has it; forgets all views."""
        found = [base.name for base, strides in cls.made if _strides(base) != strides]
        cls.made.clear()
        return found


def _strides(buffer: Any) -> list[Any]:
    return list(getattr(buffer.layout, "stride", ()))


def _write(
    lowering: Any, kernels: bool, written: Callable[[str], object], *_: Any, **__: Any
) -> None:
    """The code is written, and perhaps its kernels compiled, but not called."""
    from torch._inductor.codecache import PyCodeCache

    code = lowering.codegen()
    assert not (stale := _Views.stale()), f"read elsewhere than written: {stale}"
    code = code[0] if isinstance(code, tuple) else code
    text: str = getattr(code, "value", code)
    written(text)
    for name, source in KERNEL.findall(text) if kernels else ():
        getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
    raise Lowered


class _Moved:
    """A pass over joint graphs, before hot's: what lies on the CPU lies on the GPU."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            node.args, node.kwargs = pytree.tree_map_only(
                torch.device, lambda d: GPU if d.type == "cpu" else d, (node.args, node.kwargs)
            )
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
            node.meta.pop("tensor_meta", None)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(Tensor, _on_gpu, node.meta["val"])

    def uuid(self) -> None:
        """None: not for caches."""


def _on_gpu(value: Tensor) -> Tensor:
    return _like(value, GPU) if isinstance(value, FakeTensor) else value


def _like(value: FakeTensor, device: torch.device) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def lowered(make: Model, options: dict[str, Any] | None, hot: bool = True) -> list[tuple[str, str]]:
    """(forward or backward, nothing or the error's trace) of each graph of a step under autocast.

    ``hot``: else by Inductor as it comes.
    """
    from torch._inductor import compile_fx, config

    from hot_compile.backend import hot as ours
    from hot_compile.budget import Ledger
    from hot_compile.passes.cost.devices import rates_of
    from hot_compile.planning import _make_fake

    found: list[tuple[str, str]] = []
    asked = {"strict": True, "accept": "off", **(options or {})}
    prices = {"prices": lambda _: rates_of("h100"), "ledger": lambda _, most: Ledger(most, None)}

    def inner(gm: fx.GraphModule, _: Any, **keywords: Any) -> Callable[..., Any]:
        backward = bool(keywords.get("is_backward"))
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        _Visible.now = True
        try:
            compile_fx.compile_fx_inner(gm, inputs, **keywords)
        except Exception as error:
            trace = "" if _is_lowered(error) else traceback.format_exc()
            found.append(("backward" if backward else "forward", trace))
        finally:
            _Visible.now = False
        return _stand_in(gm, backward)

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        with config.patch(joint_custom_pre_pass=_Moved()):
            if hot:
                return ours(gm, inputs, options=asked, inner_compile=inner, **prices)
            return compile_fx.compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    model, loss = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _make_fake(model, mode)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                loss(torch.compile(model, backend=backend)).backward()
        except Exception as error:
            if not _is_lowered(error):
                found.append(("step", traceback.format_exc()))
    return found


def codes_of(make: Model, options: dict[str, Any], folder: str) -> list[str]:
    """What is written for the forward and for the backward of a step, in ``folder``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    codes: list[str] = []
    pretend(kernels=False, written=codes.append)
    graphs = lowered(make, options)
    assert graphs == [("forward", ""), ("backward", "")], graphs
    return codes


def _stand_in(gm: fx.GraphModule, backward: bool) -> Callable[..., Any]:
    """What runs in the code's place: a forward makes fake outputs, a backward ends the step."""
    (outputs,) = gm.graph.output_node().args

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        if backward:
            raise Lowered
        return [_result(node) for node in outputs]  # type: ignore[union-attr]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _result(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    if isinstance(value, FakeTensor) and value.device == GPU:
        return _like(value, torch.device("cpu"))
    return int(value) if isinstance(value, torch.SymInt) else value


def _is_lowered(error: BaseException | None) -> bool:
    while error and not isinstance(error, Lowered):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error is not None


def block() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """An EfficientNet's, and one of attention: lists of casts, images, codes, heads of words."""
    torch.manual_seed(0)
    image = nn.Sequential(
        nn.Conv2d(32, 96, 1), nn.BatchNorm2d(96), nn.SiLU(),
        nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.BatchNorm2d(96), nn.SiLU(),
        nn.Conv2d(96, 64, 1), nn.BatchNorm2d(64), nn.Flatten(2),
    )  # fmt: skip
    words = nn.TransformerEncoderLayer(56 * 56, 7, 512, dropout=0.0, batch_first=True)
    model = nn.Sequential(image, words).to(memory_format=torch.channels_last)
    pixels = torch.randn(16, 32, 56, 56)
    return model, lambda forward: forward(pixels).square().mean()


class Biased(nn.Module):
    """Attention with a table of biases, whose gradient is summed in the order of images' channels
    last, and read as a table: padded, its strides are settled late."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 49))
        self.mix, self.project = nn.Conv2d(8, 8, 1), nn.Linear(64, 64)
        self.register_buffer("place", torch.arange(49 * 49).view(49, 49) % 49)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as ``x`` [samples, 8, 49, 64]."""
        q = self.project(x)
        scores = q @ q.transpose(-1, -2) + self.table[:, self.place]
        scores = self.mix(scores.to(memory_format=torch.channels_last)).float()
        return self.mix(scores.softmax(-1)) @ q


def biased() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """See ``Biased``; autocast would have the sum in bf16 and settle it early."""
    torch.manual_seed(0)
    x = torch.randn(8, 8, 49, 64)

    def loss(forward: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x).square().mean()

    return Biased(), loss


def results(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What came of each model of the zoo, or of ``block``; ``biased`` by its name."""
    kernels = "--kernels" in arguments
    patterns = [part for text in arguments if text != "--kernels" for part in text.split(",")]
    pretend(kernels)
    models: dict[str, Model] = {"block": block, "biased": biased}
    if set(patterns) - models.keys():
        sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
        import zoo_models
        import zoo_others

        zoo_models.scale = zoo_others.scale = lambda: (8, 256)  # a GPU's
        models |= {name: _of_zoo(make) for name, make in zoo_models.every_model().items()}
    for name, make in models.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns or ["block"]):
            result: dict[str, Any] = {"name": name, "error": "", "graphs": []}
            try:
                result["graphs"] = lowered(make, {"min_gain": 0})
            except Exception:  # of the model's own
                result["error"] = traceback.format_exc()
            yield result


def alone(folder: str, *arguments: str) -> list[dict[str, Any]]:
    """The same, in a process that was forked for it; what Inductor and Triton write is there."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
    return [*results(arguments)]


def _of_zoo(make: Callable[[], Any]) -> Model:
    def made() -> tuple[nn.Module, Callable[[Any], Tensor]]:
        torch.manual_seed(0)
        built = make()
        return built.model, built.loss

    return made


if __name__ == "__main__":
    for found in results(sys.argv[1:]):
        print(json.dumps(found), flush=True)
