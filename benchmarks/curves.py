"""Loss curves: the same weights and batches trained by stock Inductor and by recipes of HOT.

    python benchmarks/curves.py --model vit_base_patch16_224 --batch 128 --json curve.json
    python benchmarks/curves.py --model llama12x2048 --batch 4 --json curve.json

A vision model sees noisy pictures of random prototypes, one a class; a language model the bytes of
Python's own library. Every configuration gets the same batches in the same order.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tables
import torch
import torch._dynamo
import typer
from models import Size, Workload, build
from report import document, environment, publish
from step import compile_for
from torch import Tensor
from torch.nn import functional as F

CLASSES = 100
NOISE = 2.0
WARM_UP_STEPS = 20
Batch = tuple[Tensor, ...]


def pictures(workload: Workload, device: torch.device) -> Callable[[int], Batch]:
    """Batches of prototypes under noise, by number of the step."""
    count, _, size, _ = workload.inputs[0].shape
    generator = torch.Generator(device).manual_seed(1)
    coarse = torch.randn(CLASSES, 3, 14, 14, device=device, generator=generator)
    prototypes = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def batch(step: int) -> Batch:
        generator.manual_seed(step)
        y = torch.randint(CLASSES, (count,), device=device, generator=generator)
        noise = torch.randn(count, 3, size, size, device=device, generator=generator)
        return prototypes[y] + NOISE * noise, y

    return batch


def library_text(workload: Workload, device: torch.device) -> Callable[[int], Batch]:
    """Batches of bytes of the standard library's sources, by number of the step."""
    count, tokens = workload.inputs[0].shape
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(1)

    def batch(step: int) -> Batch:
        generator.manual_seed(step)
        starts = torch.randint(len(data) - tokens, (count,), generator=generator).tolist()
        return (torch.stack([data[s : s + tokens] for s in starts]).long(),)

    return batch


def train(
    config: str, workload: Workload, batch: Callable[[int], Batch], steps: int, bf16: bool
) -> list[float]:
    """Loss of every step."""
    torch._dynamo.reset()
    device = batch(0)[0].device
    model = copy.deepcopy(workload.model).to(device)
    forward = compile_for(config, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / WARM_UP_STEPS)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = workload.loss(forward, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(
    model: Annotated[str, typer.Option(help="a timm model or llama12x2048")],
    batch: Annotated[int, typer.Option(help="samples per step")] = 32,
    steps: Annotated[int, typer.Option(help="steps of each configuration")] = 200,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    configs: Annotated[str, typer.Option(help="exact or a recipe, each +recompute")] = (
        "exact,hot,fast:lqs=off"
    ),
    bf16: Annotated[bool, typer.Option(help="autocast to bfloat16")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> dict[str, list[float]]:
    """Train, print a table, and write JSON on request."""
    where = torch.device(device)
    torch.manual_seed(0)
    workload = build(model, Size(batch))
    source = library_text if len(workload.inputs) == 1 else pictures
    curves = {
        config: train(config, workload, source(workload, where), steps, bf16)
        for config in configs.split(",")
    }
    title = f"{model}, batch {batch}, {'bf16' if bf16 else 'fp32'}, {environment(where)['device']}"
    arguments = {"model": model, "batch": batch, "steps": steps, "bf16": bf16}
    rows = [{"config": config, "loss": losses} for config, losses in curves.items()]
    publish(tables.curves, document(where, arguments, rows), title, json_file)
    return curves


if __name__ == "__main__":
    typer.run(main)
