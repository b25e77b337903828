"""Pictures of g_y like the supplementary's figure 2: where outliers lie, which scales suit them.

    python benchmarks/outliers.py --task digits --out docs/measured/outliers.png

Trains a task exactly, then shows |g_y| of two layers: the one that scales per token help most, and
the one they help least (LQS's measure: L2 error of quantised g_y, per token against per tensor).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from fidelity_tasks import NEEDS_PRETRAINING, TASKS, Setting, pretrain
from rich.console import Console
from torch import Tensor, nn

from hot_compile.backend import hot
from hot_compile.passes.measure.linear import granule_errors
from hot_compile.passes.measure.observe import Layer, Observer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Task, Variant, train_variants

ROWS, COLUMNS = 256, 256
"""How much of g_y is drawn: the first tokens and channels."""


class Gradients(Observer):
    """Keeps |g_y| and its two errors, layer by layer."""

    def __init__(self, rank: int = 8) -> None:
        self._rank = rank
        self.found: dict[str, tuple[Tensor, float, float]] = {}

    def __call__(self, layer: Layer, g: Tensor, weight: Tensor | None, x: Tensor | None) -> None:
        """Keep one layer's g_y [L, O]; convolutions are left out."""
        if layer.convolves:
            return
        token, tensor = (float(error) for error in granule_errors(g, self._rank))
        self.found[layer.name] = (g[:ROWS, :COLUMNS].abs().float().cpu(), token, tensor)

    def friendliest(self) -> tuple[str, str]:
        """(layer that scales per token help most, layer they help least), heads aside."""
        names = [name for name in self.found if "head" not in name]
        names.sort(key=lambda name: self.found[name][1] / self.found[name][2])
        return names[0], names[-1]


def observe_trained(task: Task, seed: int) -> Gradients:
    """Gradients of one batch after exact training."""
    seen = Gradients()

    def evaluate(model: nn.Module) -> float:
        backend = functools.partial(hot, options={"recipe": "exact", "strict": True}, observer=seen)
        with torch.enable_grad():
            x, y = next(task.batches(torch.Generator().manual_seed(seed + 1)))
            logits = torch.compile(model.train(), backend=backend)(x.to(task.device))
            y = y.to(task.device).flatten()
            nn.functional.cross_entropy(logits.flatten(0, -2), y).backward()
        return task.evaluate(model.eval())

    eager = Variant("exact", "eager")
    train_variants(replace(task, evaluate=evaluate), [eager], seed, Console(stderr=True))
    return seen


def draw(seen: Gradients, path: Path) -> None:
    """Two heat maps and, beside each, the absmax of its rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, 2, figsize=(9, 8), gridspec_kw={"width_ratios": [3, 1]}, constrained_layout=True
    )
    kinds = ("per-token friendly", "per-tensor friendly")
    for (heat, profile), name, kind in zip(axes, seen.friendliest(), kinds, strict=True):
        values, token, tensor = seen.found[name]
        shown = heat.imshow(values / values.max(), aspect="auto", cmap="magma", vmin=0, vmax=0.3)
        figure.colorbar(shown, ax=heat, label="|g_y| / largest")
        heat.set(xlabel="channel", ylabel="token (row)")
        heat.set_title(f"{kind}: {name}\nerror per token {token:.2%}, per tensor {tensor:.2%}")
        rows = values.amax(1)
        profile.plot(rows / rows.max(), range(len(rows)), linewidth=0.8)
        profile.set(xlabel="row absmax / largest", ylim=(len(rows), 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    task: Annotated[str, typer.Option(help=", ".join(TASKS))] = "digits",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: Annotated[int, typer.Option(help="initial weights and order of the batches")] = 0,
    quick: Annotated[bool, typer.Option(help="a tiny model for 8 steps")] = False,
    cells: Annotated[Path, typer.Option(help="folder of pretrained weights")] = Path(
        "out/fidelity"
    ),
    out: Annotated[Path, typer.Option(help="the picture")] = Path("docs/measured/outliers.png"),
) -> Gradients:
    """Train, observe one batch, draw."""
    if task not in TASKS:
        raise typer.BadParameter(f"got {task!r}; expected one of {', '.join(TASKS)}")
    setting = Setting(cells, device, quick)
    if task in NEEDS_PRETRAINING:
        pretrain(setting)
    seen = observe_trained(TASKS[task](setting), seed)
    draw(seen, out)
    print("| layer | g_y error per token | per tensor | ratio |\n|---|---|---|---|")
    for name, (_, token, tensor) in seen.found.items():
        print(f"| {name} | {token:.4f} | {tensor:.4f} | {token / tensor:.2f} |")
    print(f"\n{out}")
    return seen


if __name__ == "__main__":
    typer.run(main)
