"""Whole training step (forward, backward, AdamW) of a model: stock Inductor against HOT.

    python benchmarks/step.py --model vit_tiny_patch16_224 --batch 16
    python benchmarks/step.py --model vit_base_patch16_224 --batch 256 --device cuda --dtype bf16

Every configuration trains its own copy of the same weights. Steps run interleaved in one process
and the figure is the median, so that whatever else the machine does hits all of them alike.
``exact+recompute`` is the honest stock baseline for memory: Inductor told that it may recompute
pointwise results (functorch's ``ban_recompute_materialized_backward=False``). ``float8-tensorwise``
and ``float8-rowwise`` are torchao's (``pip install torchao``; GPUs of compute capability 8.9 on).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import typer
from float8_reference import takes_float8
from models import Size, Workload, build
from report import document, environment, publish
from tables import training
from torch import Tensor, nn

from hot_compile.memory import held_bytes, peak_bytes

RECOMPUTE = "+recompute"
FLOAT8 = "float8-"
DTYPES = ("fp32", "tf32", "bf16")
WARM_UP = 3
MODEL = "vit_tiny_patch16_224"


@dataclass
class Row:
    """One configuration's figures."""

    config: str
    step_ms: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    loss: float = 0.0
    samples_ms: list[float] = field(default_factory=list)


def compile_for(config: str, model: nn.Module) -> Callable[..., Any]:
    """``exact``, ``float8-<torchao's recipe>`` (changes ``model``), or a recipe of ``hot`` with
    options (``hot:memory=off:gx_bits=8``).

    Each may have ``+recompute`` behind it.
    """
    name, *settings = config.removesuffix(RECOMPUTE).split(":")
    if name.startswith(FLOAT8):
        _to_float8(model, name.removeprefix(FLOAT8))
        name = "exact"
    backend: Any = "inductor" if name == "exact" else "hot"
    ours = {"recipe": name, "strict": True} | dict(map(_setting, settings))
    options = None if name == "exact" else ours
    if config.endswith(RECOMPUTE):
        backend = _recomputing(backend)
    return torch.compile(model, backend=backend, options=options)


def _to_float8(model: nn.Module, recipe: str) -> None:
    """Every Linear but the head becomes torchao's, as its documentation recommends."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    settings = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=settings, module_filter_fn=takes_float8)


def _setting(text: str) -> tuple[str, Any]:
    """``key=value``; the value as Python reads it, or the text itself."""
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _recomputing(name: str) -> Callable[..., Any]:
    """A backend of its own, since Dynamo shares code between equal backends."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return torch._dynamo.lookup_backend(name)(gm, inputs, **kwargs)

    return backend


class Trainer:
    """One configuration: its copy of the model, its optimizer, its figures."""

    def __init__(self, config: str, workload: Workload, device: torch.device, bf16: bool):
        self.row = Row(config)
        self.device, self.bf16 = device, bf16
        self.model = copy.deepcopy(workload.model).to(device)
        self.inputs = tuple(t.to(device) for t in workload.inputs)
        self.loss_of = workload.loss
        self.forward = compile_for(config, self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self) -> Tensor:
        """Forward only."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.loss_of(self.forward, *self.inputs)

    def step(self) -> Tensor:
        """One whole training step."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure_memory(self) -> None:
        """Compile, warm up, then account for one step."""
        for _ in range(WARM_UP):
            self.step()
        loss = self.loss()
        self.row.held_bytes = held_bytes(loss, self.model, self.inputs)
        loss.backward()
        self.optimizer.zero_grad()
        self.row.peak_bytes = self._standing_bytes() + peak_bytes(self.step, self.device)

    def _standing_bytes(self) -> int:
        """Kept between steps: weights, buffers, optimizer state, inputs."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.inputs, *state]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def measure_time(self, steps: int) -> None:
        """One sample: ``steps`` steps, waited for together."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        synchronize(self.device)
        self.row.samples_ms.append((time.perf_counter() - start) / steps * 1e3)
        self.row.step_ms = statistics.median(self.row.samples_ms)
        self.row.loss = loss.item()


def _channels_last(workload: Workload) -> Workload:
    model = workload.model.to(memory_format=torch.channels_last)
    last = {"memory_format": torch.channels_last}
    inputs = (t.contiguous(**last) if t.dim() == 4 else t for t in workload.inputs)
    return replace(workload, model=model, inputs=tuple(inputs))


def synchronize(device: torch.device) -> None:
    """Wait for what was sent to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def compiler_settings(dtype: str):
    """Room for all configurations at once, and the products' precision."""
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def measure(
    workload: Workload, configs: list[str], device: torch.device, dtype: str, rounds: int
) -> list[Row]:
    """Figures of every configuration, interleaved."""
    with compiler_settings(dtype):
        trainers = [Trainer(c, workload, device, dtype == "bf16") for c in configs]
        for trainer in trainers:
            trainer.measure_memory()
        for _ in range(rounds):
            for trainer in trainers:
                trainer.measure_time(steps=4 if device.type == "cuda" else 1)
    return [trainer.row for trainer in trainers]


Width = Annotated[int | None, typer.Option(help="features, instead of the model's own")]
Depth = Annotated[int | None, typer.Option(help="blocks, instead of the model's own")]
Image = Annotated[int | None, typer.Option(help="image size, instead of the model's own")]
Last = Annotated[bool, typer.Option("--channels-last", help="weights and images so in memory")]
Tokens = Annotated[int | None, typer.Option(help="tokens per sample of a language model")]
Configs = Annotated[
    str,
    typer.Option(help="comma-separated: exact, float8-*, recipe[:option=value]; each +recompute"),
]
Json = Annotated[Path | None, typer.Option("--json", help="write figures here")]


def main(
    model: Annotated[str, typer.Option(help="a timm model or llama12x2048")] = MODEL,
    batch: Annotated[int, typer.Option(help="samples per step")] = 8,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    configs: Configs = "exact,exact+recompute,hot,fast:lqs=off",
    depth: Depth = None,
    width: Width = None,
    image: Image = None,
    tokens: Tokens = None,
    channels_last: Last = False,
    rounds: Annotated[int, typer.Option(help="timed rounds after warm-up")] = 9,
    json_file: Json = None,
) -> list[Row]:
    """Measure whole training steps."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"got {dtype!r}; expected one of {', '.join(DTYPES)}")
    where = torch.device(device)
    torch.manual_seed(0)
    size = Size(batch, depth, width, image, tokens)
    workload = build(model, size)
    workload = _channels_last(workload) if channels_last else workload
    rows = measure(workload, configs.split(","), where, dtype, rounds)
    title = f"{model}, batch {batch}, {dtype}, {environment(where)['device']}"
    arguments = {"model": model, "dtype": dtype, "channels_last": channels_last, **asdict(size)}
    publish(training, document(where, arguments, rows), title, json_file)
    return rows


if __name__ == "__main__":
    typer.run(main)
