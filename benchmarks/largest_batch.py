"""The largest batch that trains in a given amount of GPU memory: stock Inductor against HOT.

    python benchmarks/largest_batch.py --model vit_base_patch16_224 --limit-gib 24 --dtype bf16

The allocator is capped (``set_per_process_memory_fraction``), so a batch counts only if forward,
backward and AdamW really ran under the cap. The search measures the peak of two small batches,
extrapolates, and then tries: upwards while it fits, downwards while it does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from models import Size, build
from report import environment, write_json
from rich.console import Console
from rich.table import Table
from step import DTYPES, MODEL, Json, Trainer, compiler_settings

GIB = 2**30
PROBES = (32, 64)
WARM_UP = 2


@dataclass
class Row:
    """One configuration's figures."""

    config: str
    batch: int
    peak_bytes: int
    loss: float
    tried: list[int]


def search(peak_at: Callable[[int], int | None], limit: int, step: int) -> tuple[int, list[int]]:
    """Largest multiple of ``step`` whose peak exists, and every batch that was tried.

    Args:
        peak_at: bytes a batch needs, or None if it does not fit.
        limit: bytes there are.
        step: batches are multiples of it.
    """
    small, large = (peak_at(batch) for batch in PROBES)
    if small is None or large is None:
        raise typer.BadParameter(f"batch {PROBES[1]} does not fit already; give more memory")
    per_sample = (large - small) / (PROBES[1] - PROBES[0])
    guess = int(PROBES[1] + (limit - large) / per_sample) // step * step
    tried, fitting = list(PROBES), PROBES[1]
    batch = max(guess, step)
    while batch > fitting:  # downwards until one fits
        tried.append(batch)
        if peak_at(batch) is not None:
            fitting = batch
            break
        batch -= step
    while batch == fitting and batch >= guess:  # upwards, if the guess was too careful
        tried.append(batch + step)
        if peak_at(batch + step) is None:
            break
        batch = fitting = batch + step
    return fitting, tried


class Trial:
    """Trains one configuration at one batch under the cap."""

    def __init__(self, config: str, model: str, dtype: str) -> None:
        self.config, self.model, self.dtype = config, model, dtype
        self.loss = float("nan")
        self.peak = 0

    def __call__(self, batch: int) -> int | None:
        """Peak bytes of a training step, or None if memory ran out."""
        device = torch.device("cuda")
        try:
            with compiler_settings(self.dtype):
                workload = build(self.model, Size(batch))
                trainer = Trainer(self.config, workload, device, self.dtype == "bf16")
                for _ in range(WARM_UP):
                    loss = trainer.step()
                torch.cuda.reset_peak_memory_stats()
                loss = trainer.step()
            self.loss, self.peak = loss.item(), torch.cuda.max_memory_allocated()
            return self.peak
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            return None
        finally:
            trainer = loss = None  # type: ignore[assignment]
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def _ran_out(error: RuntimeError) -> bool:
    """Memory ran out, in torch or inside an operator, whose stable ABI loses the error's class."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "aten::new_empty" in str(error)


def main(
    model: Annotated[str, typer.Option(help="a timm model or llama12x2048")] = MODEL,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    limit_gib: Annotated[float, typer.Option(help="memory the allocator may use")] = 24.0,
    step: Annotated[int, typer.Option(help="batches are multiples of this")] = 16,
    configs: Annotated[str, typer.Option(help="comma-separated")] = "exact,exact+recompute,hot",
    json_file: Json = None,
) -> list[Row]:
    """Find and print the largest batches. Needs a CUDA device."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("got no CUDA device; only CUDA's allocator can be capped")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_gib * GIB / total)
    rows = []
    for config in configs.split(","):
        trial = Trial(config, model, dtype)
        batch, tried = search(trial, int(limit_gib * GIB), step)
        rows.append(Row(config, batch, trial.peak, trial.loss, tried))
    device = torch.device("cuda")
    table = Table(title=f"{model}, {dtype}, {limit_gib:g} GiB of {environment(device)['device']}")
    for column in ("configuration", "largest batch", "times stock's"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.config, str(row.batch), f"{row.batch / rows[0].batch:.2f}x")
    Console(width=100).print(table)
    if json_file:
        arguments = {"model": model, "dtype": dtype, "limit_gib": limit_gib, "step": step}
        write_json(json_file, device, arguments, [asdict(row) for row in rows])
    return rows


if __name__ == "__main__":
    typer.run(main)
