"""What watching gradient quality costs: a watched step against a usual one, and the share at N.

python benchmarks/monitor.py --model vit_tiny_patch16_224 --batch 16
python benchmarks/monitor.py --model vit_base_patch16_224 --batch 64 --device cuda --dtype bf16
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from models import Size, build
from report import document, environment, publish
from step import DTYPES, compiler_settings
from tables import monitoring

import hot_compile


def main(
    model: Annotated[str, typer.Option(help="a timm name, or llama<layers>x<width>")] = (
        "vit_tiny_patch16_224"
    ),
    batch: Annotated[int, typer.Option()] = 16,
    depth: Annotated[int, typer.Option(help="0: the model's own")] = 0,
    rounds: Annotated[int, typer.Option(help="usual and watched steps of each kind")] = 5,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> dict[str, float]:
    """Time steps of one run in which every second forward is watched."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"got {dtype!r}; expected one of {', '.join(DTYPES)}")
    where = torch.device(device)
    work = build(model, Size(batch=batch, depth=depth or None))
    network = work.model.to(where)
    inputs = [t.to(where) for t in work.inputs]
    options = {"monitor": hot_compile.Monitor(every=2), "min_gain": 0, "strict": True}
    step = torch.compile(network, backend="hot", options=options)
    times: list[list[float]] = [[], []]
    with compiler_settings(dtype):
        for number in range(2 * rounds + 4):
            start = time.perf_counter()
            with torch.autocast(where.type, torch.bfloat16, enabled=dtype == "bf16"):
                loss = work.loss(step, *inputs)
            loss.backward()
            network.zero_grad()
            if where.type == "cuda":
                torch.cuda.synchronize()
            times[number % 2].append(time.perf_counter() - start)
    # Forward 0 is usual and reads nothing; each usual one after a watched one reads its figures.
    usual, watched = (statistics.median(kind[2:]) for kind in times)
    facts = environment(where)
    title = f"{model}, batch {batch}, {dtype}, {facts['device']}, torch {facts['torch']}"
    row = {"usual_ms": usual * 1e3, "watched_ms": watched * 1e3}
    said = document(where, {"model": model, "batch": batch, "dtype": dtype}, [row])
    publish(monitoring, said, title, json_file)
    return row


if __name__ == "__main__":
    typer.run(main)
