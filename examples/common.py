"""What the examples and the quality benchmark share: variants, the training loop, the report."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from hot_compile.memory import held_bytes

WARM_UP_STEPS = 5
"""Steps left out of the median time: the first compiles, the next fill caches."""

# Options that every example takes.
Recipe = Annotated[str, typer.Option(help="recipe of the second run: hot, fast, paper, ...")]
Seed = Annotated[int, typer.Option(help="initial weights and order of the batches")]
Out = Annotated[Path, typer.Option(help="folder for the picture of both loss curves")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Quick = Annotated[bool, typer.Option(help="a tiny model for 8 steps")]
OUT = Path("out")

Batches = Iterator[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Variant:
    """One way to compile a model, by the name that tables show."""

    label: str
    backend: str | Callable[..., Any] = "inductor"
    options: dict[str, Any] | None = None

    @classmethod
    def named(cls, name: str) -> Variant:
        """``exact`` is stock Inductor; any other name is a recipe of ``backend="hot"``."""
        return cls(name) if name == "exact" else cls(name, "hot", {"recipe": name})

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """The model under this variant; the model itself stays as it is."""
        return torch.compile(model, backend=self.backend, options=self.options)


def classification_loss(forward: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of ``forward(x)`` [..., classes] with ``y`` [...]."""
    return nn.functional.cross_entropy(forward(x).flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Task:
    """Something to train: every variant starts from the same weights and sees the same batches."""

    build: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Batches]
    evaluate: Callable[[nn.Module], float]
    metric: str
    steps: int
    learning_rate: float
    device: torch.device
    weight_decay: float = 0.05
    loss: Callable[..., Tensor] = classification_loss
    """Of a forward (compiled or not) and a batch."""
    bf16: bool = False
    """Forwards run in autocast."""


@dataclass
class Run:
    """What training one variant gave."""

    label: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    held: int = 0
    score: float = math.nan

    @property
    def median_step(self) -> float:
        """Median seconds per step after warm-up."""
        return statistics.median(self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)


def learn(
    loss_of_a_batch: Callable[[], Tensor], optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """So many steps, each on a batch of its own; gives the losses, and prints them now and then."""
    losses = []
    for step in range(steps):
        loss = loss_of_a_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(task: Task, recipe: str, seed: int, picture: Path) -> list[Run]:
    """Train with exact Inductor, then with HOT: same seed, same weights, same batches."""
    console = Console()
    runs = train_variants(task, [Variant.named("exact"), Variant.named(recipe)], seed, console)
    print_table(runs, task, console)
    plot_losses(runs, picture)
    console.print(f"loss curves: {picture}")
    return runs


def train_variants(task: Task, variants: list[Variant], seed: int, console: Console) -> list[Run]:
    """Train one copy of the same initial model per variant, one after the other."""
    torch.manual_seed(seed)
    initial = task.build().to(task.device)
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        return [_train(task, v, copy.deepcopy(initial), seed, bar) for v in variants]


def _train(task: Task, variant: Variant, model: nn.Module, seed: int, bar: Progress) -> Run:
    torch.manual_seed(seed)
    run = Run(variant.label)
    row = bar.add_task(variant.label, total=task.steps, loss="compiling")
    step = _Step(task, model, variant.compile(model.train()))
    batches = task.batches(torch.Generator().manual_seed(seed))
    for _ in range(task.steps):
        step(run, *next(batches))
        bar.update(row, advance=1, loss=f"loss {run.losses[-1]:.3f}")
    run.score = task.evaluate(model.eval())  # uncompiled: the forward is exact in every variant
    bar.update(row, loss=f"{task.metric} {run.score:.4g}")
    return run


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak rate: a linear warm-up over a tenth of all steps, then cosine decay."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


class _Step:
    """One training step after the other, with cosine decay after a short linear warm-up."""

    def __init__(self, task: Task, model: nn.Module, forward: Callable[..., Tensor]):
        self.task, self.model, self.forward = task, model, forward
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate(step, task.steps)
        )

    def __call__(self, run: Run, x: Tensor, y: Tensor) -> None:
        x, y = x.to(self.task.device), y.to(self.task.device)
        synchronize(self.task.device)
        start = time.perf_counter()
        loss = self.task.loss(self.forward, x, y)
        if not run.held:  # first step: its time is not counted
            run.held = held_bytes(loss, self.model, (x, y))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.task.device)
        run.step_seconds.append(time.perf_counter() - start)
        run.losses.append(loss.item())
        self.schedule.step()


def shuffled(x: Tensor, y: Tensor, batch: int, draw: torch.Generator) -> Batches:
    """Endless epochs in fresh order; a last, smaller batch is dropped (one shape, one compile)."""
    while True:
        order = torch.randperm(len(x), generator=draw).to(x.device)
        for i in range(0, len(x) - batch + 1, batch):
            index = order[i : i + batch]
            yield x[index], y[index]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> float:
    """Share of right answers."""
    right = 0
    for part_x, part_y in zip(x.split(200), y.split(200), strict=True):
        right += int((model(part_x.to(device)).argmax(-1) == part_y.to(device)).sum())
    return right / len(x)


def print_table(runs: list[Run], task: Task, console: Console) -> None:
    """The closing table; time and memory also as a ratio to the first run."""
    where = f"{task.device}, {torch.get_num_threads()} CPU threads"
    table = Table(title=f"{task.steps} steps on {where}")
    table.add_column("variant")
    for column in (f"held-out {task.metric}", "ms per step", "faster", "MB held", "smaller"):
        table.add_column(column, justify="right")
    first = runs[0]
    for run in runs:
        table.add_row(
            run.label,
            f"{run.score:.4f}",
            f"{run.median_step * 1e3:.1f}",
            f"{first.median_step / run.median_step:.2f}x",
            f"{run.held / 1e6:.1f}",
            f"{first.held / max(run.held, 1):.2f}x",
        )
    console.print(table)


def plot_losses(runs: list[Run], path: Path) -> None:
    """Both training curves in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        axes.plot(run.losses, label=run.label, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
