"""Whole steps of models as people bring them: stock Inductor beside hot, everything a user pays.

    python benchmarks/against_stock.py --device cuda --json out.json
    python benchmarks/against_stock.py --device cpu --rows vit-tiny,gpt2-tiny,sd3-tiny --dtype fp32
    python benchmarks/against_stock.py --rows 8192x128256x4096,16384x50257x768 \\
        --configs exact,hot,hot:head=int8:accept=off,liger,cce   # heads alone, others' losses
    python benchmarks/against_stock.py --rows mlps \\
        --configs exact,hot:min_gain=0,hot:min_gain=0:accept=off   # what small layers take the host

One process a row, its configurations in turns, forwards and backwards; ``--jobs`` rows compile at
once, but are timed one by one. ``ms`` is the best round, steps running one behind the other; ``host
ms`` is how long the host takes to send one step off; ``launches`` are kernels and copies a step;
``peak`` is above what stands between steps (weights, optimizer state); ``compile`` is the first
step with cold caches, comparable within a row.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import diffusion
import head
import torch
import typer
from models import Size, Workload, build
from report import StepRow, document, show, write_json
from step import compile_for, compiler_settings, synchronize
from tables import steps
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from hot_compile.frameworks import trace_past_warnings
from hot_compile.memory import peak_bytes
from hot_compile.observing import acceptance

acceptance.LASTS = 0.0
"""Rows are of runs that last: what their steps were found to take is followed at once."""

CONFIGS = "exact,exact+recompute,hot,hot:memory=off"
STEPS = {"cuda": 5, "cpu": 1}
WARM_UP = {"cuda": 60, "cpu": 4}
"""Steps before anything is measured. Meanwhile hot looks at steps, times them, and compiles again
by what it finds."""
LONGEST, NAME = 40, 120
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WHISPER = {
    "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
}  # fmt: skip
"""The size called tiny."""


@dataclass(frozen=True)
class Case:
    """A model at a size; ``adamw`` adds the optimizer's step."""

    model: str
    size: Size
    adamw: bool = False
    loss_only: bool = False
    """A language model that returns its loss, not its logits."""
    lora: bool = False
    """Adapters alone are trained; in bf16 the rest is kept in it, as their training scripts do."""


CASES = {
    "gpt2": Case("gpt2", Size(8, tokens=1024)),
    "gpt2-loss": Case("gpt2", Size(8, tokens=1024), loss_only=True),
    "gpt2-6": Case("gpt2", Size(16, depth=6, tokens=1024)),
    "qwen3": Case("qwen3", Size(4, tokens=2048)),
    "qwen3-loss": Case("qwen3", Size(4, tokens=2048), loss_only=True),
    "llama6x2048": Case("llama12x2048", Size(4, depth=6)),
    "vit-b-128": Case("vit_base_patch16_224", Size(128)),
    "vit-b-96": Case("vit_base_patch16_224", Size(96)),
    "vit-b-256": Case("vit_base_patch16_224", Size(256), adamw=True),
    "llama12x2048": Case("llama12x2048", Size(8), adamw=True),
    "resnet50-256": Case("resnet50", Size(256), adamw=True),
    "mixer-b-128": Case("mixer_b16_224", Size(128)),
    "convnext-b-48": Case("convnext_base", Size(48)),
    "swin-b-48": Case("swin_base_patch4_window7_224", Size(48)),
    "efficientnet-b0-128": Case("efficientnet_b0", Size(128)),
    "regnety-32-128": Case("regnety_032", Size(128)),
    "whisper": Case("whisper", Size(16, tokens=64)),
    "convnext-t-128": Case("convnext_tiny", Size(128)),
    "swin-t-128": Case("swin_tiny_patch4_window7_224", Size(128)),
    "bert": Case("bert", Size(32, tokens=512)),
    "llama8b-lora": Case("llama8b", Size(1, depth=4, tokens=8192), lora=True),
    "sd3": Case("sd3", Size(4)),
    "sd3-lora": Case("sd3", Size(4), lora=True),
    "flux": Case("flux", Size(2)),
    "flux-lora": Case("flux", Size(2), lora=True),
    "unet": Case("unet", Size(16)),
    "unet-lora": Case("unet", Size(16), lora=True),
    "video": Case("video", Size(2)),
    "video-lora": Case("video", Size(2), lora=True),
    "sd3-tiny": Case("sd3", Size(2, depth=2, width=384, image=32)),
    "flux-tiny-lora": Case("flux", Size(2, depth=1, width=384, image=16), lora=True),
    "unet-tiny": Case("unet", Size(2, width=64, image=32)),
    "llama-tiny-lora": Case("llama12x2048", Size(1, depth=2, width=384, tokens=256), lora=True),
    "video-tiny": Case("video", Size(1, depth=1, width=384, image=16)),
    "vit-tiny": Case("vit_tiny_patch16_224", Size(8)),
    "gpt2-tiny": Case("gpt2", Size(1, depth=2, tokens=256)),
    "gpt2-tiny-loss": Case("gpt2", Size(1, depth=1, tokens=256), loss_only=True),
    "mlps": Case("mlps", Size(64, depth=12)),
}
"""Rows of the table, by name, beside heads alone ("LxOxI"). The tiny ones are for a CPU; of
diffusion, and small residual MLPs, only by name."""
_BESIDE = {"tiny", "mlps", *diffusion.MODELS}
ON_A_GPU = ",".join(name for name in CASES if _BESIDE.isdisjoint(name.split("-")))


@dataclass
class Row(StepRow):
    """The same with what a GPU runs."""

    launches: int = 0
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    """Name, launches and ms a step of those that take longest; in the JSON only."""
    calls: list[tuple[str, int, float]] = field(default_factory=list)
    """The same of what takes the host longest, itself: operators, launches, waits (profiled, which
    makes each longer)."""


def case_of(name: str) -> Case:
    """Raises typer.BadParameter if there is none of this name."""
    if name not in CASES and not re.fullmatch(r"\d+x\d+x\d+", name):
        raise typer.BadParameter(f"got {name}; known are LxOxI, {', '.join(CASES)}")
    return CASES.get(name) or Case(name, Size(1))


def workload(case: Case) -> Workload:
    """Random weights and inputs; Hugging Face's models return loss and logits, unchanged."""
    size = case.size
    if case.model in diffusion.MODELS:
        return diffusion.build(case.model, size, case.lora)
    if case.model[0].isdigit():
        rows, outputs, inputs = map(int, case.model.split("x"))
        labels = torch.randint(outputs, (rows,))
        return Workload(head.Alone(rows, outputs, inputs), (labels,), _as_it_is)
    if case.model in head.MODELS:
        model = head.build(case.model, size.depth)
    elif case.model == "bert":
        import transformers

        model = transformers.BertForMaskedLM(transformers.BertConfig(**NO_DROPOUT))
    elif case.model == "whisper":
        import transformers

        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
        features = torch.randn(size.batch, 80, 3000)
        labels = torch.randint(1000, (size.batch, size.tokens or 1))
        return Workload(model.train(), (features, labels), _spoken_loss)
    else:
        work = build(case.model, size)
        return replace(work, model=_adapted(work.model)) if case.lora else work
    ids = torch.randint(model.config.vocab_size, (size.batch, size.tokens or 1))
    if case.loss_only:
        return Workload(head.LossOnly(model.train()), (ids,), _as_it_is)
    return Workload(model.train(), (ids,), _own_loss)


def _adapted(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))


def _own_loss(forward: Callable[..., Any], ids: Tensor) -> Tensor:
    return forward(ids, labels=ids).loss


def _spoken_loss(forward: Callable[..., Any], features: Tensor, labels: Tensor) -> Tensor:
    return forward(features, labels=labels).loss


def _as_it_is(forward: Callable[..., Any], ids: Tensor) -> Tensor:
    return forward(ids)


class Stepper:
    """One configuration: its copy of the model and its figures."""

    def __init__(self, row: Row, work: Workload, device: torch.device, bf16: bool, adamw: bool):
        self.row, self.device, self.bf16 = row, device, bf16
        self.model: Any = copy.deepcopy(work.model).to(device)
        if bf16 and isinstance(self.model, head.Alone):
            self.model.to(torch.bfloat16)
        other = row.config in head.FUNCTIONS
        if other and not isinstance(self.model, (head.Alone, head.LossOnly)):
            raise ValueError(f"{row.config} makes the loss of a model that returns nothing else")
        self.inputs = tuple(t.to(device) for t in work.inputs)
        self.loss_of = work.loss
        if other:
            self.model.config = row.config
        self.forward = compile_for("exact" if other else row.config, self.model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True) if adamw else None

    def step(self) -> Tensor:
        """Forward, backward, and the optimizer's step if there is one."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss_of(self.forward, *self.inputs)
        loss.backward()
        if self.optimizer:
            self.optimizer.step()
        self.model.zero_grad()
        return loss.detach()

    def compile(self) -> None:
        """The first step, timed, and what memory a later one needs."""
        start = time.perf_counter()
        with fresh_cache():
            self._waited(self.step)
        self.row.compile_s = time.perf_counter() - start
        for _ in range(WARM_UP[self.device.type]):
            self._waited(self.step)
        self.row.peak_bytes = peak_bytes(self.step, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other rows' processes share the device

    def measure(self, steps: int, counts: bool = True) -> None:
        """One round; the first does not count: what ran before left the device cool for who is
        first, and large products are as fast as its power allows."""
        synchronize(self.device)
        start = time.perf_counter()
        self._waited(lambda: [self.step() for _ in range(steps)])
        ms = (time.perf_counter() - start) / steps * 1e3
        start = time.perf_counter()
        loss = self.step()
        host_ms = (time.perf_counter() - start) * 1e3
        if counts:
            self.row.best_ms = min(self.row.best_ms, ms)
            self.row.host_ms = min(self.row.host_ms, host_ms)
        self.row.loss = loss.item()

    def look_at_kernels(self) -> None:
        """Kernels and copies of one step, and what the host does for it."""
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            self._waited(self.step)
        device, events = torch.autograd.DeviceType.CUDA, seen.key_averages()
        kernels = [e for e in events if e.device_type == device]
        self.row.launches = sum(event.count for event in kernels)
        kernels.sort(key=lambda event: -event.self_device_time_total)
        self.row.kernels = [
            (e.key[:NAME], e.count, e.self_device_time_total / 1e3) for e in kernels[:LONGEST]
        ]
        calls = sorted(
            (e for e in events if e.device_type != device), key=lambda e: -e.self_cpu_time_total
        )
        self.row.calls = [
            (e.key[:NAME], e.count, e.self_cpu_time_total / 1e3) for e in calls[:LONGEST]
        ]

    def _waited(self, work: Callable[[], Any]) -> None:
        work()
        synchronize(self.device)


def measure(
    name: str, configs: list[str], device: torch.device, dtype: str, rounds: int
) -> Iterator[list[Row]]:
    """Compiles every configuration before it yields the first time; then measures and yields."""
    torch.manual_seed(0)
    trace_past_warnings()
    case = case_of(name)
    work = workload(case)
    with compiler_settings(dtype):
        rows = [Row(name, config) for config in configs]
        steppers = [Stepper(row, work, device, dtype == "bf16", case.adamw) for row in rows]
        for stepper in steppers:
            stepper.compile()
            row = stepper.row
            print(f"{name} {row.config}: {row.compile_s:.0f} s, {row.peak_bytes / 2**20:.0f} MiB")
        yield rows
        for turn in range(rounds + 1):
            for stepper in steppers[:: 1 - 2 * (turn % 2)]:
                stepper.measure(STEPS[device.type], turn > 0)
        if device.type == "cuda":
            for stepper in steppers:
                stepper.look_at_kernels()
        yield rows


def answer(run: Iterator[list[Any]]) -> None:
    """A child says what it knows when all is compiled, and, when told to measure, what it found."""
    answers, compiled = sys.stdout, False
    with contextlib.redirect_stdout(sys.stderr):
        for rows in run:
            print(json.dumps([asdict(row) for row in rows]), file=answers, flush=True)
            if not (compiled or getattr(rows[0], "error", "")):
                sys.stdin.readline()
            compiled = True


class Child:
    """A row's process: says what it knows when it has compiled, and when it has measured."""

    def __init__(self, name: str, arguments: list[str], program: str = __file__):
        self.name = name
        command = [sys.executable, program, "--child", name, *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def compiled(self) -> list[dict[str, Any]]:
        """Waits; peaks and compile times, empty if it died (what it said is on stderr)."""
        return self._answer()

    def measured(self) -> list[dict[str, Any]]:
        """Measured now; empty if it died."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        found = self._answer()
        self._process.wait()
        return found

    def kill(self) -> None:
        """It took too long."""
        self._process.kill()

    def _answer(self) -> list[dict[str, Any]]:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline().strip() or "[]")


def _measure_all(names: list[str], arguments: list[str], jobs: int) -> Iterator[list[Row]]:
    """What is known so far, each time that it is more."""
    known: dict[str, list[dict[str, Any]]] = {}
    for first in range(0, len(names), jobs):
        children = [Child(name, arguments) for name in names[first : first + jobs]]
        for child in children:
            known[child.name] = child.compiled()
            yield _rows_of(known)
        for child in children:
            if known[child.name]:
                known[child.name] = child.measured() or known[child.name]
                yield _rows_of(known)


def _rows_of(known: dict[str, list[dict[str, Any]]]) -> list[Row]:
    return [Row(**row) for rows in known.values() for row in rows]


def main(
    rows: Annotated[str, typer.Option(help="comma-separated, of " + ", ".join(CASES))] = ON_A_GPU,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    dtype: Annotated[str, typer.Option(help="fp32, tf32 or bf16 (autocast)")] = "bf16",
    configs: Annotated[str, typer.Option(help="as for step.py; the first is stock")] = CONFIGS,
    rounds: Annotated[int, typer.Option(help="timed rounds")] = 8,
    jobs: Annotated[int, typer.Option(help="rows that compile at once")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
    calls: Annotated[int, typer.Option(help="print what takes the host longest")] = 0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> list[Row]:
    """Measure whole steps of many models."""
    if child:
        answer(measure(child, configs.split(","), torch.device(device), dtype, rounds))
        return []
    for name in rows.split(","):
        case_of(name)
    arguments = ["--device", device, "--dtype", dtype, "--configs", configs]
    measured: list[Row] = []
    where = torch.device(device)
    settings = {"dtype": dtype, "configs": configs, "rounds": rounds, "jobs": jobs}
    for measured in _measure_all(rows.split(","), [*arguments, "--rounds", str(rounds)], jobs):
        if json_file:  # each time: what was measured stays, whatever stops the rest
            write_json(json_file, where, settings, [asdict(row) for row in measured])
    said = document(where, settings, measured)
    show(steps([said]), f"{dtype}, {said['environment']['device']}")
    for row in measured:
        for name, count, ms in row.calls[:calls]:
            print(f"{row.case} {row.config}: {ms:8.3f} ms in {count:5d} x {name[:60]}")
    return measured


if __name__ == "__main__":
    typer.run(main)
