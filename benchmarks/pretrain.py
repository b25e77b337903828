"""Training from random weights at a real size: does it end where exact training ends?

    python benchmarks/pretrain_data.py --out tokens
    python benchmarks/pretrain.py gpt2 --tokens tokens --config exact --json gpt2_exact.json
    python benchmarks/pretrain.py gpt2 --tokens tokens --config hot --json gpt2_hot.json
    python benchmarks/pretrain.py vit --config hot --json vit_hot.json
    python benchmarks/pretrain.py report gpt2_*.json --plot gpt2.png

One configuration a process (``step.py`` says how they are written), so that several GPUs can share
the work: same weights, same batches in the same order, AdamW with warm-up and a cosine. Held-out
loss is measured on the uncompiled model. What was measured is written at every evaluation.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from report import show, write_json
from rich.console import Console
from step import compile_for, synchronize
from tables import pretraining
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from data import glyphs

app = typer.Typer(no_args_is_help=True, help=__doc__)
Config = Annotated[str, typer.Option(help="exact, hot, fast, hot:forward=int8, ...")]
Json = Annotated[Path, typer.Option("--json", help="where the figures go")]
Device = Annotated[str, typer.Option(help="cuda or cpu")]
Rate = Annotated[float, typer.Option(help="highest learning rate")]
Every = Annotated[int, typer.Option(help="steps between evaluations")]

Batch = tuple[Tensor, ...]
WARM_UP = 0.02
"""Share of all steps in which the learning rate rises."""
LAST = 0.1
"""The last learning rate, of the highest."""


@dataclass
class Run:
    """What one configuration did; ``curve`` has (step, training loss, held-out loss, seconds)."""

    task: str
    config: str
    steps: int
    batch: int
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)
    score: float = math.nan
    """Of held-out pictures, the share that is told right."""
    step_ms: float = 0.0
    """Mean of all steps behind the first evaluation, evaluations aside."""
    peak_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Task:
    """A model, its batches by number, its loss, and how it is judged on held-out data."""

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[..., Tensor]
    judge: Callable[[], tuple[float, float]]
    """Held-out loss, and the share told right (or nan)."""
    steps: int
    batch_size: int
    rate: float


def train(task: Task, config: str, device: torch.device, every: int, path: Path) -> Run:
    """Train one configuration; ``path`` is rewritten at every evaluation."""
    run = Run(task.name, config, task.steps, task.batch_size)
    forward = compile_for(config, task.model)
    optimizer = _optimizer(task, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, task.steps))
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    start, trained = time.perf_counter(), 0.0
    for first in range(0, task.steps, every):
        steps = range(first, min(first + every, task.steps))
        mark, total = time.perf_counter(), torch.zeros((), device=device)
        for step in steps:
            with bf16:
                loss = task.loss(forward, *task.batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(task.model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += loss.detach()
        synchronize(device)
        if first:  # the first steps compile
            trained += time.perf_counter() - mark
            run.step_ms = trained * 1e3 / (steps.stop - every)
            run.peak_bytes = _peak(device)
        with bf16:
            held_out, run.score = task.judge()
        run.seconds = time.perf_counter() - start
        run.curve.append((steps.stop, float(total) / len(steps), held_out, run.seconds))
        _write(path, run, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    return run


def _optimizer(task: Task, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; what has one dimension does not decay."""
    parameters = list(task.model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=task.rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _rate(step: int, steps: int) -> float:
    """Of the highest learning rate: linear up, a cosine down."""
    rising = max(1, round(WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    share = (step - rising) / max(1, steps - rising)
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * share)) / 2


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _write(path: Path, run: Run, device: torch.device) -> None:
    step, loss, held_out, seconds = run.curve[-1]
    figures = f"loss {loss:.4f}, held out {held_out:.4f}, {seconds:.0f} s"
    Console().print(f"{run.config}: step {step} of {run.steps}, {figures}")
    write_json(path, device, {}, [asdict(run)])


@app.command()
def gpt2(
    json_: Json,
    tokens: Annotated[Path, typer.Option(help="folder that pretrain_data.py wrote")],
    config: Config = "hot",
    device: Device = "cuda",
    batch: Annotated[int, typer.Option(help="rows of `length` tokens a step")] = 16,
    length: Annotated[int, typer.Option(help="tokens a row")] = 1024,
    millions: Annotated[float, typer.Option(help="tokens to train on, in millions")] = 100.0,
    layers: Annotated[int, typer.Option(help="blocks of the model")] = 12,
    rate: Rate = 6e-4,
    every: Every = 500,
) -> None:
    """GPT-2 as Hugging Face builds it, without dropout, on ``pretrain_data.py``'s tokens."""
    import transformers

    where = torch.device(device)
    text, held_out = (_rows(tokens / f"{n}.npy", length) for n in ("train", "held_out"))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(text)))
    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    settings = transformers.GPT2Config(n_layer=layers, n_positions=length, use_cache=False, **none)
    model = transformers.GPT2LMHeadModel(settings).to(where)

    def rows(step: int) -> Batch:
        chosen = order[(torch.arange(batch) + step * batch) % len(order)]
        return (_ids(text, chosen.numpy(), where),)

    def loss(forward: Callable[..., Any], ids: Tensor) -> Tensor:
        return forward(ids, labels=ids).loss

    @torch.no_grad()
    def judge() -> tuple[float, float]:
        model.eval()
        starts = range(0, min(len(held_out), 512), batch)
        chosen = (np.arange(s, min(s + batch, len(held_out))) for s in starts)
        found = [float(loss(model, _ids(held_out, rows, where))) for rows in chosen]
        model.train()
        return sum(found) / len(found), math.nan

    steps = round(millions * 1e6 / batch / length)
    task = Task("gpt2", model.train(), rows, loss, judge, steps, batch, rate)
    train(task, config, where, every, json_)


def _rows(path: Path, length: int) -> np.ndarray:
    """Rows of ``length`` tokens, one behind the other; what is left over is dropped."""
    if not path.exists():
        raise typer.BadParameter(f"got no file {path}; write it with pretrain_data.py --out")
    tokens = np.load(path, mmap_mode="r")
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _ids(rows: np.ndarray, chosen: np.ndarray, device: torch.device) -> Tensor:
    ids = torch.from_numpy(rows[chosen].astype(np.int64))
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


@app.command()
def vit(
    json_: Json,
    config: Config = "hot",
    device: Device = "cuda",
    batch: Annotated[int, typer.Option(help="pictures a step")] = 256,
    per_class: Annotated[int, typer.Option(help="pictures of each of 100 classes")] = 1250,
    epochs: Annotated[int, typer.Option(help="how often each is seen")] = 8,
    width: Annotated[int, typer.Option(help="of the model, in 64s per head")] = 384,
    depth: Annotated[int, typer.Option(help="blocks of the model")] = 12,
    rate: Rate = 1e-3,
    every: Every = 400,
) -> None:
    """ViT-S on rendered letters, all different: 100 classes, a fifth held out."""
    from timm.models.vision_transformer import VisionTransformer

    where = torch.device(device)
    data = glyphs(100, per_class=per_class)
    x, y, held_x, held_y = (
        t.to(where) for t in (data.train_x, data.train_y, data.held_out_x, data.held_out_y)
    )
    order = torch.cat([torch.randperm(len(y), generator=_seeded(n)) for n in range(epochs)])
    order = order.to(where)
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=4, in_chans=1, num_classes=100, embed_dim=width, depth=depth,
        num_heads=width // 64,
    ).to(where)  # fmt: skip

    def pictures(step: int) -> Batch:
        chosen = order[step * batch : (step + 1) * batch]
        return x[chosen], y[chosen]

    def loss(forward: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(forward(x), y)

    @torch.no_grad()
    def judge() -> tuple[float, float]:
        model.eval()
        told = torch.cat([model(part) for part in held_x.split(1024)]).float()
        model.train()
        right = (told.argmax(1) == held_y).float().mean()
        return float(F.cross_entropy(told, held_y)), float(right)

    steps = len(order) // batch
    task = Task("vit", model.train(), pictures, loss, judge, steps, batch, rate)
    train(task, config, where, every, json_)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="what runs of one task wrote")],
    plot: Annotated[Path | None, typer.Option(help="picture of the held-out losses")] = None,
) -> None:
    """A table of several runs, each beside the first, and a picture of their curves."""
    runs = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    show(pretraining([{"rows": runs}]), runs[0]["task"])
    if plot:
        _plot(runs, plot)


def _plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        axes.plot(*zip(*((at[0], at[2]) for at in run["curve"]), strict=True), label=run["config"])
    axes.set(xlabel="step", ylabel="held-out loss", title=runs[0]["task"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app()
