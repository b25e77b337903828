"""Does HOT train as well? Recipes x seeds on the examples' real data, beside exact Inductor.

    python benchmarks/quality.py --task digits --recipes hot,fast,paper --seeds 3 --json digits.json
    python benchmarks/quality.py --task source --recipes hot --seeds 3

Prints a Markdown table: mean of the held-out metric over seeds, its range, and the difference to
exact with its standard error, pairing the runs of one seed (same weights, same batches).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tables
import torch
import typer
from report import document, environment, publish
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Task, Variant, train_variants
from train_char_gpt import char_gpt_task
from train_resnet_digits import glyphs_task, two_digits_task
from train_vit_digits import digits_task

TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits_task,
    "two-digits": two_digits_task,
    "glyphs": glyphs_task,
    "source": char_gpt_task,
}


@dataclass
class Row:
    """One recipe's held-out metric per seed."""

    recipe: str
    scores: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    held_bytes: int = 0


def measure(task: Task, recipes: list[str], seeds: int, console: Console) -> list[Row]:
    """Train every recipe with every seed; seeds share what is compiled."""
    torch._dynamo.reset()
    rows = {name: Row(name) for name in recipes}
    variants = [Variant.named(name) for name in recipes]
    with torch._dynamo.config.patch(recompile_limit=64):
        for seed in range(seeds):
            for run in train_variants(task, variants, seed, console):
                row = rows[run.label]
                row.scores.append(run.score)
                row.step_ms.append(run.median_step * 1e3)
                row.held_bytes = run.held
    return list(rows.values())


def main(
    task: Annotated[str, typer.Option(help=", ".join(TASKS))] = "digits",
    recipes: Annotated[str, typer.Option(help="comma-separated, beside exact")] = "hot,fast,paper",
    seeds: Annotated[int, typer.Option(help="how many")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    quick: Annotated[bool, typer.Option(help="tiny models for 8 steps")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> list[Row]:
    """Compare held-out metrics."""
    if task not in TASKS:
        raise typer.BadParameter(f"got {task!r}; expected one of {', '.join(TASKS)}")
    where = torch.device(device)
    work = TASKS[task](quick=quick, device=device)
    names = ["exact", *(r for r in recipes.split(",") if r and r != "exact")]
    rows = measure(work, names, seeds, Console(stderr=True))
    facts = environment(where)
    title = f"{task}, {seeds} seeds, {work.steps} steps, torch {facts['torch']}, {facts['device']}"
    arguments = {"task": task, "seeds": seeds, "steps": work.steps, "metric": work.metric}
    publish(tables.quality, document(where, arguments, rows), title, json_file)
    return rows


if __name__ == "__main__":
    typer.run(main)
