"""The largest batch that trains in a given amount of GPU memory: stock Inductor against HOT.

    python benchmarks/largest_batch.py --model vit_base_patch16_224 --limit-gib 24 --dtype bf16

The allocator is capped (``set_per_process_memory_fraction``), so a batch counts only if forward,
backward and AdamW really ran under the cap, and the largest only if the next one did not. The
search measures the peak of two small batches, extrapolates, and narrows down around that. The batch
is a dynamic dimension: one compilation serves every batch that is tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import torch._dynamo
import typer
from models import Size, build
from report import environment, write_json
from rich.console import Console
from rich.table import Table
from step import DTYPES, MODEL, Json, Trainer, compiler_settings
from torch import Tensor

GIB = 2**30
PROBES = (4, 2)  # steps
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
    large, small = (factor * step for factor in PROBES)
    tried, peaks = [large, small], [peak_at(large), peak_at(small)]
    if None in peaks:
        raise typer.BadParameter(f"batch {large} does not fit already; give more memory")
    per_sample = (peaks[0] - peaks[1]) / (large - small)  # type: ignore[operator]
    guess = int(large + (limit - peaks[0]) / per_sample) // step * step  # type: ignore[operator]
    fitting, failing, stride = large, None, step
    batch = max(guess, large + step)
    while failing is None or failing - fitting > step:
        tried.append(batch)
        if peak_at(batch) is None:
            failing = batch
        else:
            fitting = batch
        if failing is None:
            batch += stride
        elif fitting == large:  # nothing near it has fitted yet
            batch = max(batch - stride, large + step)
        else:
            batch = (fitting + failing) // 2 // step * step
        stride *= 2
    return fitting, tried


class Trial:
    """Trains one configuration under the cap, one batch after the other."""

    def __init__(self, config: str, model: str, dtype: str, device: torch.device) -> None:
        self.config, self.model, self.dtype, self.device = config, model, dtype, device
        self.peaks: dict[int, int] = {}
        self.losses: dict[int, float] = {}
        self._trainer: Trainer | None = None
        self._samples: tuple[Tensor, ...] = ()

    def __call__(self, batch: int) -> int | None:
        """Peak bytes of a training step, or None if memory ran out."""
        try:
            return self._train(batch)
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            return None
        finally:
            if self._trainer is not None:
                self._trainer.optimizer.zero_grad()
                self._trainer.inputs = ()
            gc.collect()
            torch.cuda.empty_cache()

    def _train(self, batch: int) -> int:
        trainer = self._prepared(batch)
        for _ in range(WARM_UP):
            trainer.step()
        torch.cuda.reset_peak_memory_stats()
        loss = trainer.step()
        self.losses[batch] = loss.item()
        self.peaks[batch] = torch.cuda.max_memory_allocated()
        return self.peaks[batch]

    def _prepared(self, batch: int) -> Trainer:
        """The one trainer, with ``batch`` samples: those of the first batch, over and over."""
        if self._trainer is None:
            workload = build(self.model, Size(batch))
            self._samples = workload.inputs
            self._trainer = Trainer(self.config, workload, self.device, self.dtype == "bf16")
        times = -(-batch // len(self._samples[0]))
        repeated = (torch.cat([t] * times)[:batch] for t in self._samples)
        self._trainer.inputs = tuple(t.to(self.device) for t in repeated)
        torch._dynamo.mark_dynamic(self._trainer.inputs[0], 0)
        return self._trainer


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
    rows, device = [], torch.device("cuda")
    for config in configs.split(","):
        trial = Trial(config, model, dtype, device)
        with compiler_settings(dtype):
            batch, tried = search(trial, int(limit_gib * GIB), step)
        rows.append(Row(config, batch, trial.peaks[batch], trial.losses[batch], tried))
        del trial
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
