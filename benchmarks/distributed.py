"""Whole steps on several GPUs (DDP, FSDP2, FSDP2 with checkpointing): stock Inductor beside hot.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --json out.json
    torchrun --nproc-per-node 2 benchmarks/distributed.py --device cpu --rows vit-tiny-ddp

Started with ``torchrun`` on any number of processes, a GPU each (or CPUs, by gloo). Every
configuration trains its own copy with AdamW in bf16, interleaved round by round; FSDP2 shards and
compiles block by block, as its documentation recommends. ``ms`` is the best round of the slowest
process; ``MiB`` is the first process's peak above what stands between steps.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import Size, Workload, build
from report import StepRow, environment, write_json
from rich.console import Console
from rich.table import Table
from step import compile_for, compiler_settings, synchronize
from torch import Tensor, distributed, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hot_compile.memory import peak_bytes

STEPS = {"cuda": 5, "cpu": 1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """A model at a size, and how its processes share the work."""

    model: str
    size: Size
    sharded: bool = False
    """FSDP2; else DDP."""
    checkpointed: bool = False
    """Blocks keep only their inputs."""


CASES = {
    "vit-b-ddp": Case("vit_base_patch16_224", Size(96)),
    "llama-ddp": Case("llama12x2048", Size(4, depth=6)),
    "llama-fsdp2": Case("llama12x2048", Size(4, depth=6), sharded=True),
    "llama-fsdp2-checkpointed": Case("llama12x2048", Size(4, depth=6), True, True),
    "vit-tiny-ddp": Case("vit_tiny_patch16_224", Size(2, depth=2)),
    "vit-tiny-fsdp2": Case("vit_tiny_patch16_224", Size(2, depth=2), True, True),
}
"""Rows of the table, by name. The tiny ones are for CPUs."""
ON_GPUS = ",".join(name for name in CASES if "tiny" not in name)


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.ModuleList | nn.Sequential, str]]:
    """(owner, name) of a transformer's blocks: the longest list of modules that are alike."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    alike = [m for m in lists if len({type(child) for child in m}) == 1]
    longest = max(alike, key=len)
    return ((longest, name) for name, _ in longest.named_children())


class Stepper:
    """One configuration: its copy of the model, wrapped, and its figures."""

    def __init__(self, row: StepRow, case: Case, work: Workload, device: torch.device):
        self.row, self.device = row, device
        self.inputs = tuple(t.to(device) for t in work.inputs)
        self.loss_of = work.loss
        self.autocast = not case.sharded
        model = copy.deepcopy(work.model).to(device)
        wrap = self._shard if case.sharded else self._replicate
        self.forward = wrap(model, case.checkpointed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def _replicate(self, model: nn.Module, checkpointed: bool) -> Callable[..., Any]:
        on = [self.device.index] if self.device.type == "cuda" else None
        return compile_for(self.row.config, DistributedDataParallel(model, device_ids=on))

    def _shard(self, model: nn.Module, checkpointed: bool) -> Callable[..., Any]:
        for owner, name in blocks_of(model):
            block: Any = getattr(owner, name)
            if checkpointed:
                block = checkpoint_wrapper(block)
            block = compile_for(self.row.config, block)
            setattr(owner, name, fully_shard(block, mp_policy=BF16))
        return fully_shard(model, mp_policy=BF16)

    def step(self) -> Tensor:
        """Forward, backward and the optimizer's step."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.loss_of(self.forward, *self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def compile(self) -> None:
        """The first step, timed, and what memory a later one needs."""
        start = time.perf_counter()
        self._waited(1)
        self.row.compile_s = time.perf_counter() - start
        self._waited(2)
        self.row.peak_bytes = peak_bytes(self.step, self.device)

    def measure(self) -> None:
        """One round."""
        steps = STEPS[self.device.type]
        self.row.best_ms = min(self.row.best_ms, self._waited(steps) / steps * 1e3)
        start = time.perf_counter()
        loss = self.step()
        self.row.host_ms = min(self.row.host_ms, (time.perf_counter() - start) * 1e3)
        self.row.loss = loss.item()

    def _waited(self, steps: int) -> float:
        """Seconds that the slowest process takes for so many steps."""
        distributed.barrier()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        spent = torch.tensor(time.perf_counter() - start, device=self.device)
        distributed.all_reduce(spent, distributed.ReduceOp.MAX)
        return spent.item()


def measure(name: str, configs: list[str], device: torch.device, rounds: int) -> list[StepRow]:
    """Figures of every configuration, interleaved. Every process calls it alike."""
    torch.manual_seed(0)  # FSDP2 shards what every process has: weights must be alike
    case = CASES[name]
    work = build(case.model, case.size)
    rows = [StepRow(name, config) for config in configs]
    with compiler_settings("bf16"), fresh_cache():
        steppers = [Stepper(row, case, work, device) for row in rows]
        for stepper in steppers:
            stepper.compile()
        for _ in range(rounds):
            for stepper in steppers:
                stepper.measure()
    return rows


def as_table(rows: list[StepRow], title: str) -> Table:
    """Each figure, and time and peak against the first configuration of its case."""
    table = Table(title=title)
    for column in ("case", "configuration"):
        table.add_column(column)
    for column in ("ms", "of stock's speed", "host ms", "MiB", "of stock's", "first s", "loss"):
        table.add_column(column, justify="right")
    for row in rows:
        stock = next(other for other in rows if other.case == row.case)
        table.add_row(
            *(row.case, row.config, f"{row.best_ms:.1f}", f"{stock.best_ms / row.best_ms:.2f}x"),
            *(f"{row.host_ms:.1f}", f"{row.peak_bytes / 2**20:.0f}"),
            *(f"{row.peak_bytes / max(1, stock.peak_bytes):.2f}", f"{row.compile_s:.0f}"),
            f"{row.loss:.4f}",
        )
    return table


def main(
    rows: Annotated[str, typer.Option(help="comma-separated, of " + ", ".join(CASES))] = ON_GPUS,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    configs: Annotated[str, typer.Option(help="as for step.py; the first is stock")] = "exact,hot",
    rounds: Annotated[int, typer.Option(help="timed rounds")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> list[StepRow]:
    """Measure whole steps on as many processes as torchrun started."""
    if unknown := [name for name in rows.split(",") if name not in CASES]:
        raise typer.BadParameter(f"got {', '.join(unknown)}; known are {', '.join(CASES)}")
    if "RANK" not in os.environ:
        raise typer.BadParameter("start it with `torchrun --nproc-per-node N`, N GPUs")
    on = torch.device(device, int(os.environ["LOCAL_RANK"]) if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(on)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    measured = [
        row for name in rows.split(",") for row in measure(name, configs.split(","), on, rounds)
    ]
    if distributed.get_rank() == 0:
        title = f"{distributed.get_world_size()} x {environment(on)['device']}, bf16"
        Console(width=140).print(as_table(measured, title))
        if json_file:
            settings = {"configs": configs, "processes": distributed.get_world_size()}
            write_json(json_file, on, settings, [asdict(row) for row in measured])
    distributed.destroy_process_group()
    return measured


if __name__ == "__main__":
    typer.run(main)
