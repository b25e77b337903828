"""Whole steps on several GPUs (DDP, FSDP2, tensor parallelism): stock Inductor beside hot.

    python benchmarks/distributed.py --json out.json
    python benchmarks/distributed.py --device cpu --rows tiny-ddp,tiny-fsdp2

Starts what it needs: for each row a process a GPU (or CPU, by gloo). All rows compile at once, wait
for each other, and are timed one by one; a row that fails or takes too long costs itself, and is
tried once more behind the others. Every configuration trains its own copy with AdamW in bf16,
interleaved round by round; one that is named twice has other weights and data the second time, by
which it is seen how far losses differ anyway, and hot begins then with what its first found, as a
later run does (``--configs exact,hot,exact,hot``). ``ms`` is the best round of the slowest process.
Memory is the most of any process: ``peak`` above what stands between steps (weights, optimizer's
state, buffers), ``kept`` what is there after the forward, ``total`` the peak with what stands.
``loss`` is the mean of the last ten of fifty steps, ``differs`` the mean difference of all fifty
from the first configuration's.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import typer
from models import Size, build
from report import StepRow, environment, write_json
from rich.console import Console
from rich.table import Table
from sharing import (
    Share,
    parameters_by_mesh,
    replicated,
    sharded,
    split,
    split_and_sharded,
    titans,
)
from step import compiler_settings, synchronize
from torch import Tensor, distributed
from torch._inductor.utils import fresh_cache
from torch.distributed import PrefixStore, TCPStore

from hot_compile.frameworks import trace_past_warnings
from hot_compile.memory import peak_bytes
from hot_compile.observing import acceptance
from hot_compile.runtime.native.build import load

STEPS = {"cuda": 5, "cpu": 1}
WARM_UP = {"cuda": 60, "cpu": 4}
"""Steps before anything is measured. Meanwhile hot looks at steps, times them, and compiles again
by what it finds; and processes ask each other how they fare."""
CURVE = 50
MEASURING_S = 60
"""So long a row may take once all have compiled."""
HOST = "127.0.0.1"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink's multicast may be off on a machine, and NCCL then fails where it tries it."""


@dataclass(frozen=True)
class Case:
    """A model at a size (of one process's batch), and how processes share it."""

    model: str
    size: Size
    share: Share

    @property
    def by_fsdp(self) -> bool:
        """FSDP2 casts weights to bf16 itself; others are in autocast."""
        return self.share not in (replicated, split)


CHECKPOINTED = functools.partial(sharded, checkpointed=True)
TITANS_CHECKPOINTED = functools.partial(titans, checkpointed=True)
LLAMA, LLAMA_8B = ("llama12x2048", Size(4, depth=6)), ("llama8b", Size(2, depth=4))
TINY = ("llama12x2048", Size(1, depth=2, width=256, tokens=64))
CASES = {
    "llama-fsdp2": Case(*LLAMA, sharded),
    "llama-fsdp2-checkpointed": Case(*LLAMA, CHECKPOINTED),
    "llama8b-fsdp2": Case(*LLAMA_8B, sharded),
    "llama8b-fsdp2-checkpointed": Case(*LLAMA_8B, CHECKPOINTED),
    "vit-b-ddp": Case("vit_base_patch16_224", Size(96), replicated),
    "llama-tp": Case(*LLAMA, split),
    "llama-fsdp2-tp": Case(*LLAMA, split_and_sharded),
    "llama-titan": Case(*LLAMA, titans),
    "llama-titan-checkpointed": Case(*LLAMA, TITANS_CHECKPOINTED),
    "tiny-ddp": Case("vit_tiny_patch16_224", Size(2, depth=2), replicated),
    "tiny-fsdp2": Case(*TINY, sharded),
    "tiny-fsdp2-checkpointed": Case(*TINY, CHECKPOINTED),
    "tiny-tp": Case(*TINY, split),
    "tiny-fsdp2-tp": Case(*TINY, split_and_sharded),
    "tiny-titan": Case(*TINY, titans),
    "tiny-titan-checkpointed": Case(*TINY, TITANS_CHECKPOINTED),
}
"""Rows of the table, by name. The tiny ones are for CPUs."""
ON_GPUS = ",".join(name for name in CASES if "tiny" not in name)


@dataclass
class Row(StepRow):
    """The same with what several processes need, and how losses went."""

    kept_bytes: int = 0
    standing_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    """Of the first steps; the mean over processes."""
    error: str = ""


class Stepper:
    """One configuration: its copy of the model, shared, and its figures."""

    def __init__(self, row: Row, case: Case, device: torch.device, seed: int):
        self.row, self.device = row, device
        self._stood = self._allocated()
        torch.manual_seed(seed)  # weights must be alike in all processes
        parts = 1 if case.share is split else distributed.get_world_size()
        size = case.size.times(parts)
        with device:
            work = build(case.model, size)
        mine = distributed.get_rank() % parts
        self._inputs = tuple(t.chunk(parts)[mine].clone() for t in work.inputs)
        self._loss_of, self._autocast = work.loss, not case.by_fsdp
        self._forward = case.share(work.model, row.config, device)
        groups = parameters_by_mesh(work.model)
        self._optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self._losses: list[Tensor] = []

    def compile(self) -> None:
        """The first step, timed, and what memory a later one needs."""
        start = time.perf_counter()
        self._waited(1)
        self.row.compile_s = time.perf_counter() - start
        self._waited(WARM_UP[self.device.type])
        peak = peak_bytes(self.step, self.device)
        before = self._allocated()
        loss = self._forwarded()
        kept = self._allocated() - before
        self._finish(loss)
        figures = torch.tensor([peak, kept, before - self._stood], device=self.device)
        distributed.all_reduce(figures, distributed.ReduceOp.MAX)
        self.row.peak_bytes, self.row.kept_bytes, self.row.standing_bytes = figures.tolist()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other rows' processes share the device

    def measure(self) -> None:
        """One round."""
        steps = STEPS[self.device.type]
        self.row.best_ms = min(self.row.best_ms, self._waited(steps) / steps * 1e3)
        start = time.perf_counter()
        self.step()
        self.row.host_ms = min(self.row.host_ms, (time.perf_counter() - start) * 1e3)

    def tell_losses(self) -> None:
        """Of the steps until now, as far as they count."""
        losses = torch.stack(self._losses[:CURVE]).float()
        distributed.all_reduce(losses)
        self.row.losses = (losses / distributed.get_world_size()).tolist()
        self.row.loss = statistics.mean(self.row.losses[-10:])

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        self._finish(self._forwarded())

    def _forwarded(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self._loss_of(self._forward, *self._inputs)

    def _finish(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach())

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

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def measure(
    name: str, configs: list[str], device: torch.device, rounds: int
) -> Iterator[list[Row]]:
    """Compiles every configuration before it yields the first time; then measures and yields."""
    trace_past_warnings()
    acceptance.LASTS = 0.0  # rows are of runs that last: what steps take is followed at once
    rows = [Row(name, config) for config in configs]
    with compiler_settings("bf16"), fresh_cache():
        steppers = []
        for place, row in enumerate(rows):
            stepper = Stepper(row, CASES[name], device, configs[:place].count(row.config))
            stepper.compile()
            steppers.append(stepper)
        yield rows
        for _ in range(rounds):
            for stepper in steppers:
                stepper.measure()
        for stepper in steppers:
            stepper.tell_losses()
        yield rows


class Group:
    """A row's processes, and what they say through a store that the first process keeps."""

    def __init__(self, name: str, arguments: list[str], processes: int, store: TCPStore, wave: int):
        self.name, key = name, f"{name} {wave}"
        self._store = PrefixStore(key, store)
        command = [sys.executable, __file__, *arguments, "--processes", str(processes)]
        command += ["--port", str(store.port), "--child", key, "--rank"]
        self._processes = [subprocess.Popen([*command, str(rank)]) for rank in range(processes)]

    def compiled(self, until: float) -> list[Row]:
        """Peaks and compile times, once they are there; a row with an error if they never are."""
        return self._answer("compiled", until)

    def measured(self) -> list[Row]:
        """Measured now."""
        self._store.set("go", "")
        found = self._answer("measured", time.monotonic() + MEASURING_S)
        self.kill()
        return found

    def kill(self) -> None:
        """All of them, and their memory."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _answer(self, key: str, until: float) -> list[Row]:
        why = f"not {key} in time"
        while time.monotonic() < until:
            if self._store.check([key]):
                return [Row(**row) for row in json.loads(self._store.get(key))]
            if any(process.poll() for process in self._processes):
                why = "a process died"
                break
            time.sleep(0.1)
        self.kill()
        if self._store.check(["error"]):
            why = self._store.get("error").decode()
        return [Row(self.name, "", error=why)]


def _child(
    key: str, rank: int, processes: int, port: int, device: str, configs: str, rounds: int
) -> None:
    """One process of a row: says what it knows when all is compiled, and, once told to measure,
    what it found. Ends when it is killed: NCCL's own end may wait for others."""
    store = PrefixStore(key, TCPStore(HOST, port))
    on = torch.device(device, rank if device == "cuda" else None)
    try:
        if device == "cuda":
            torch.cuda.set_device(on)
        backend = "nccl" if device == "cuda" else "gloo"
        own = PrefixStore(f"{key} job", TCPStore(HOST, port))  # who waits blocks a connection
        distributed.init_process_group(backend, store=own, rank=rank, world_size=processes)
        run = measure(key.split()[0], configs.split(","), on, rounds)
        for said in ("compiled", "measured"):
            rows = [asdict(row) for row in next(run)]
            if rank == 0:
                store.set(said, json.dumps(rows))
            store.wait(["go"], timedelta(hours=1))
        store.wait(["end"], timedelta(minutes=1))
    except BaseException:
        if not store.check(["error"]):  # the first counts: others fail since it is gone
            store.set("error", f"rank {rank}: {traceback.format_exc()}")
        traceback.print_exc()
        os._exit(1)


def _measure_all(
    names: list[str], arguments: list[str], processes: int, seconds: int
) -> Iterator[list[Row]]:
    """What is known so far, each time that it is more. What failed is tried once more if a third of
    the time is left."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    end, known = time.monotonic() + seconds, dict[str, list[Row]]()
    for wave in range(2):
        left = end - time.monotonic()
        if wave and left < seconds / 3:
            return
        until = end - left / 3  # the rest is for measuring
        groups = [Group(name, arguments, processes, store, wave) for name in names]
        try:
            for group in groups:
                known[group.name] = group.compiled(until)
                yield _told(known)
            names = [group.name for group in groups if known[group.name][0].error]
            for group in groups:
                if group.name not in names:
                    found = group.measured()
                    if found[0].error:
                        names.append(group.name)
                        known[group.name][0].error = found[0].error
                    else:
                        known[group.name] = found
                    yield _told(known)
        finally:
            for group in groups:
                group.kill()


def _told(known: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in known.values() for row in rows]


def as_table(rows: list[Row], title: str) -> Table:
    """Each figure, and time and peak against the first configuration of its case."""
    table = Table(title=title)
    for column in ("case", "configuration"):
        table.add_column(column)
    columns = ("ms", "of stock's speed", "host ms", "peak MiB", "of stock's", "kept MiB")
    columns += ("of stock's", "total MiB", "first s", "loss", "differs")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        if row.error and not row.peak_bytes:
            table.add_row(row.case, row.error.strip().splitlines()[-1])
            continue
        stock = next(other for other in rows if other.case == row.case)
        pairs = zip(row.losses, stock.losses, strict=True)
        differs = statistics.mean([abs(mine - its) for mine, its in pairs] or [0.0])
        table.add_row(
            *(row.case, row.config, f"{row.best_ms:.1f}", f"{stock.best_ms / row.best_ms:.2f}x"),
            *(f"{row.host_ms:.1f}", f"{row.peak_bytes / 2**20:.0f}"),
            f"{row.peak_bytes / max(1, stock.peak_bytes):.2f}",
            f"{row.kept_bytes / 2**20:.0f}",
            f"{row.kept_bytes / max(1, stock.kept_bytes):.2f}",
            f"{(row.standing_bytes + row.peak_bytes) / 2**20:.0f}",
            *(f"{row.compile_s:.0f}", f"{row.loss:.4f}", f"{differs:.4f}"),
        )
    return table


def _prepare(device: str, processes: int, jobs: int) -> None:
    """Kernels are built before all processes want them, which share the cores."""
    load(device)
    cores = max(1, (os.cpu_count() or 1) // (processes * jobs))
    os.environ.update(NO_MULTICAST)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def main(
    rows: Annotated[str, typer.Option(help="comma-separated, of " + ", ".join(CASES))] = ON_GPUS,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    configs: Annotated[
        str, typer.Option(help="as for step.py; the first is stock")
    ] = "exact,hot,exact",
    rounds: Annotated[int, typer.Option(help="timed rounds")] = 8,
    processes: Annotated[int, typer.Option(help="of each row")] = 2,
    seconds: Annotated[int, typer.Option(help="two thirds of them for compiling")] = 280,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    rank: Annotated[int, typer.Option(hidden=True)] = 0,
    port: Annotated[int, typer.Option(hidden=True)] = 0,
) -> list[Row]:
    """Measure whole steps of models that several processes share."""
    if child:
        _child(child, rank, processes, port, device, configs, rounds)
        return []
    names = rows.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"got {', '.join(unknown)}; known are {', '.join(CASES)}")
    _prepare(device, processes, len(names))
    arguments = ["--device", device, "--configs", configs, "--rounds", str(rounds)]
    settings = {"configs": configs, "rounds": rounds, "processes": processes}
    where, measured = torch.device(device), list[Row]()
    for measured in _measure_all(names, arguments, processes, seconds):
        if json_file:  # each time: what was measured stays, whatever stops the rest
            write_json(json_file, where, settings, [asdict(row) for row in measured])
    title = f"{processes} x {environment(where)['device']}, bf16"
    Console(width=160).print(as_table(measured, title))
    for row in measured:
        if row.error:
            print(f"{row.case}: {row.error}")
    return measured


if __name__ == "__main__":
    typer.run(main)
