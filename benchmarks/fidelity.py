"""Does HOT train as well, everywhere? Tasks x recipes x seeds, beside the papers' baselines.

    python benchmarks/fidelity.py run --device cuda --jobs 12          # all cells, resumable
    python benchmarks/fidelity.py run --tasks digits --recipes exact,hot --seeds 3
    python benchmarks/fidelity.py report                               # docs/fidelity.md, JSON, PNG

A cell is one task trained with one recipe from one seed; its result is a JSON file below ``--out``,
and cells that are there are not run again. All cells of a task and seed start from the same weights
and see the same batches. By default the finished graphs are run node by node: the arithmetic of the
code that Inductor makes of them (``--lower``) without its compile time. Sized for 25 minutes of one
H200.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fidelity_report import write_report
from fidelity_tasks import NEEDS_PRETRAINING, TASKS, Setting, pretrain
from report import environment
from rich.console import Console
from torch import nn
from torch._inductor.compile_fx import compile_fx_inner

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.memory import held_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Task, learning_rate

app = typer.Typer(help=__doc__.split("\n")[0], no_args_is_help=True, add_completion=False)

PER_TOKEN = {"recipe": "paper", "per_token": True}
LOW_RANK = {"*lora_*": "hla8"}
RECIPES: dict[str, dict[str, Any]] = {
    "exact": {"recipe": "exact"},
    "hot": {"recipe": "hot", "memory": "off"},
    "hot+lqs": {"recipe": "hot", "memory": "off", "lqs": "auto"},
    "hot, memory": {"recipe": "hot"},
    "fast": {"recipe": "fast", "memory": "off"},
    "fast+lqs": {"recipe": "fast", "memory": "off", "lqs": "auto"},
    "paper": {"recipe": "paper"},
    "paper+lqs": {"recipe": "paper", "lqs": "auto"},
    "int4-naive": {"recipe": "int4-naive"},
    "luq": {"recipe": "luq"},
    "lbp-wht": {"recipe": "lbp-wht"},
    "int8": {"recipe": "int8", "memory": "off"},
    "paper, no ABC": {**PER_TOKEN, "recompute": True},
    **{f"paper, r={rank}": {**PER_TOKEN, "rank": rank} for rank in (16, 8, 4, 2, 1)},
    "LoRA factors": {"recipe": "paper", "exclude": ["*.base_layer"], "override": LOW_RANK},
    "LoRA frozen": {"recipe": "paper"},
    "LoRA both": {"recipe": "paper", "override": LOW_RANK},
}
"""Options by the name that tables show. Every layer is rewritten, whether or not it pays; other
tensors that cross to the backward are left alone, except in "hot, memory", the default of ``hot``.
"""
MAIN = tuple(RECIPES)[:12]
EXTRA: dict[str, tuple[str, ...]] = {
    "glyph-scratch": tuple(f"paper, r={rank}" for rank in (16, 8, 4, 2, 1)),
    "glyph-tune": ("paper, no ABC", "paper, r=8"),
    "lora": ("LoRA factors", "LoRA frozen", "LoRA both"),
}
"""Rows of the supplementary's tables 2, 1 and 3 beyond the main ones."""
LORA_MAIN = ("exact", "hot", "hot, memory", "fast")


def recipes_of(task: str) -> tuple[str, ...]:
    """The recipes that the full suite runs for a task."""
    return (LORA_MAIN if task == "lora" else MAIN) + EXTRA.get(task, ())


def cell_path(out: Path, task: str, recipe: str, seed: int) -> Path:
    """Where one cell's result is kept."""
    name = "".join(c if c.isalnum() or c in "+=-" else "_" for c in recipe)
    return out / "cells" / task / f"{name}.{seed}.json"


Out = Annotated[Path, typer.Option(help="folder of the cells")]
OUT = Path("out/fidelity")


@app.command()
def run(
    tasks: Annotated[str, typer.Option(help=f"comma-separated; {', '.join(TASKS)}")] = "",
    recipes: Annotated[str, typer.Option(help="separated by ';'; by default the suite's")] = "",
    seeds: Annotated[int, typer.Option(help="how many")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    jobs: Annotated[int, typer.Option(help="processes at once")] = 1,
    quick: Annotated[bool, typer.Option(help="tiny models for 8 steps")] = False,
    lower: Annotated[bool, typer.Option(help="generate Inductor's code")] = False,
    deadline: Annotated[float, typer.Option(help="start nothing after this many seconds")] = 1e9,
    out: Out = OUT,
) -> None:
    """Train every cell that has no result yet, one process per task and recipe."""
    names = [name for name in tasks.split(",") if name] or list(TASKS)
    if unknown := set(names) - set(TASKS):
        raise typer.BadParameter(f"got {sorted(unknown)}; expected some of {', '.join(TASKS)}")
    chosen = [name for name in recipes.split(";") if name]
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"got {sorted(unknown)}; expected some of {'; '.join(RECIPES)}")
    setting = Setting(out, device, quick)
    start, console = time.monotonic(), Console(stderr=True)
    groups = [(task, recipe) for task in names for recipe in chosen or recipes_of(task)]
    groups.sort(key=lambda group: list(RECIPES).index(group[1]))

    def one(group: tuple[str, str]) -> None:
        task, recipe = group
        missing = [s for s in range(seeds) if not cell_path(out, task, recipe, s).exists()]
        if not missing or time.monotonic() - start > deadline:
            return
        threads = max(1, (os.cpu_count() or 1) // jobs)
        code = _in_a_process(task, recipe, missing, setting, lower, threads)
        mark = "done" if code == 0 else f"FAILED ({code})"
        console.print(f"{time.monotonic() - start:5.0f} s  {task} {recipe}: {mark}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, groups))


def _in_a_process(
    task: str, recipe: str, seeds: list[int], setting: Setting, lower: bool, threads: int
) -> int:
    """A process of its own per task and recipe: seeds share what it compiles."""
    command = [sys.executable, __file__, "cells", task, recipe, ",".join(map(str, seeds))]
    command += ["--out", str(setting.out), "--device", setting.device]
    command += ["--quick"] * setting.quick + ["--lower"] * lower
    setting.out.mkdir(parents=True, exist_ok=True)
    environ = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
    }
    with (setting.out / "log.txt").open("a") as log:
        return subprocess.run(command, stdout=log, stderr=log, env=environ, check=False).returncode


@app.command(hidden=True)
def cells(
    task: str,
    recipe: str,
    seeds: str,
    out: Out = OUT,
    device: str = "cpu",
    quick: bool = False,
    lower: bool = False,
) -> None:
    """Train one task with one recipe from each of the seeds."""
    setting = Setting(out, device, quick)
    if task in NEEDS_PRETRAINING:
        pretrain(setting)
    work = TASKS[task](setting)
    reports = Reports()
    profile = out / "profiles" / f"{task}.{recipe}.json"
    inner = compile_fx_inner if lower else run_uncompiled
    backend = _backend(recipe, work, profile, recorder=reports, inner_compile=inner)
    for seed in map(int, seeds.split(",")):
        losses, held, score = train(work, backend, seed)
        plan = reports.graphs[-1].plan if reports.graphs else ()
        data = {
            "task": task, "recipe": recipe, "seed": seed, "options": RECIPES[recipe],
            "metric": work.metric, "score": score, "steps": work.steps, "held_bytes": held,
            "losses": [round(loss, 4) for loss in losses],
            "strategies": {d.site: f"{d.strategy}" for d in plan},
            "reasons": {d.site: d.reason for d in plan}, "quick": quick,
            "environment": environment(work.device),
        }  # fmt: skip
        print(f"{task} {recipe} {seed}: {score:.4f}", flush=True)
        path = cell_path(out, task, recipe, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(data, indent=1) + "\n")
        path.with_suffix(".partial").rename(path)


def train(task: Task, backend: Callable[..., Any], seed: int) -> tuple[list[float], int, float]:
    """(losses, bytes held between forward and backward, held-out metric) of one cell.

    Never waits for the device, so that several processes can share one.
    """
    torch.manual_seed(seed)
    model = task.build().to(task.device).train()
    cuda = task.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay, fused=cuda
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, task.steps))
    torch.manual_seed(seed)
    forward = torch.compile(model, backend=backend)
    batches = task.batches(torch.Generator().manual_seed(seed))
    losses, held = [], 0
    for step in range(task.steps):
        x, y = (_move(t, task.device) for t in next(batches))
        loss = nn.functional.cross_entropy(forward(x).flatten(0, -2), y.flatten())
        if step == 0:
            held = held_bytes(loss, model, (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), held, task.evaluate(model.eval())


def _move(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def _backend(recipe: str, task: Task, profile: Path, **keywords: Any) -> Callable[..., Any]:
    """The recipe as a backend that every seed shares, rewriting whatever can be."""
    options: dict[str, Any] = {**RECIPES[recipe], "min_gain": 0}
    if options.get("lqs"):
        options |= {"lqs_warm_up": task.steps // 4, "profile": str(profile)}
    return functools.partial(hot, options=options, **keywords)


@app.command()
def report(
    out: Out = OUT,
    document: Annotated[Path, typer.Option(help="its marked tables are replaced")] = Path(
        "docs/fidelity.md"
    ),
) -> None:
    """Tables, JSON and picture from the cells that there are."""
    for line in write_report(out, document, MAIN):
        print(line)


if __name__ == "__main__":
    torch._dynamo.config.recompile_limit = 64
    app()
