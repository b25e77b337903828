"""Does HOT train as well? Recipes x seeds on the examples' real data, beside exact Inductor.

    python benchmarks/quality.py --task digits --recipes hot,fast,paper --seeds 3 --json digits.json
    python benchmarks/quality.py --task source --recipes hot --seeds 3

Prints a Markdown table: mean of the held-out metric over seeds, its range, and the difference to
exact with its standard error, pairing the runs of one seed (same weights, same batches).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from report import environment, write_json
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

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.scores)

    def difference(self, exact: Row) -> tuple[float, float]:
        """Mean of this minus exact, seed by seed, and the standard error of that mean."""
        pairs = [a - b for a, b in zip(self.scores, exact.scores, strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
        return statistics.fmean(pairs), error


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


def markdown(rows: list[Row], task: Task) -> str:
    """The table for docs/measured/benchmarks.md."""
    exact = rows[0]
    lines = [
        f"| recipe | held-out {task.metric}, mean | lowest to highest | minus exact | MB held |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mean, error = row.difference(exact)
        against = "" if row is exact else f"{mean:+.4f} ± {error:.4f}"
        spread = f"{min(row.scores):.4f} to {max(row.scores):.4f}"
        lines.append(
            f"| {row.recipe} | {row.mean:.4f} | {spread} | {against} | {row.held_bytes / 1e6:.1f} |"
        )
    return "\n".join(lines)


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
    print(f"{task}, {seeds} seeds, {work.steps} steps, torch {facts['torch']}, {facts['device']}\n")
    print(markdown(rows, work))
    if json_file:
        arguments = {"task": task, "seeds": seeds, "steps": work.steps, "metric": work.metric}
        write_json(json_file, where, arguments, [asdict(row) for row in rows])
    return rows


if __name__ == "__main__":
    typer.run(main)
