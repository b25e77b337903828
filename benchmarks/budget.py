"""Budgets of a step's true peak, from stock's down to the least: asked, met, and what it costs.

    python benchmarks/budget.py --json budget.json
    python benchmarks/budget.py --cases gpt2 --points 5 --jobs 10 --json gpt2.json  # minutes
    python benchmarks/budget.py --cases vit-tiny --device cpu --dtype fp32 --points 2

First each case's ends: stock Inductor's peak, and the least that hot's storage reaches; and stock
with every block checkpointed by its library. Between the ends, at equal distances, and at what
checkpointing needs, ``peak_budget`` with these bytes and, beside it, stock with torch's own
``activation_memory_budget``. Below, where tensors have to wait in host memory, ``peak_budget``
alone: what is less than possible is a row with the error. A process a configuration: up to
``--jobs`` of them compile at once, and are timed one by one. Peaks are all that stands in the
device's memory, weights included. A process that fails, or takes longer than ``--limit``, is a row
with its error; the JSON is written after every row. The last column is what torch's own takes at
the same peak, between its two points next to it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from against_stock import CASES, STEPS, Child, Stepper, answer, workload
from against_stock import Row as StepperRow
from report import StepRow, document, show, write_json
from step import compiler_settings
from tables import CHECKPOINTED, STOCK, TORCH, budgets
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from hot_compile.errors import OptionWarning
from hot_compile.frameworks import trace_past_warnings
from hot_compile.memory import peak_bytes

ON_A_GPU = "vit-b-128,gpt2,resnet50-256"
LEAST = "hot:memory_budget=0"
BELOW = (0.85, 0.7)
"""Of that peak, where nothing but host memory helps."""
WARM_UP = 20
"""Steps: the budget is corrected twice at most, five steps each."""
ROUNDS = 6
THREADS = 3
"""That compile, of each process."""
SMALLEST = 0.2
"""Of torch's own budget."""


@dataclass
class Row(StepRow):
    """One configuration's figures."""

    asked_bytes: int = 0
    """0: no budget."""
    compiled: int = 0
    """Graphs, each time they were compiled."""
    error: str = ""


def configurations(ends: list[Row], points: int, below: bool) -> list[tuple[str, int]]:
    """(configuration, bytes asked): from stock's peak to the least, where checkpointing is, below.

    ``ends``: what was measured of stock, of the least and, perhaps, of checkpointing.
    """
    (stock, least, *others), found = (row.peak_bytes for row in ends), []
    for place in range(points):
        part = place / max(1, points - 1)
        found.append(_within(int(stock + (least - stock) * part)))
        found.append((f"{TORCH}{1 - (1 - SMALLEST) * part:.2f}", 0))
    lower = [int(least * part) for part in BELOW] if below else []
    return found + [_within(peak) for peak in (*others, *lower)]


def _within(asked: int) -> tuple[str, int]:
    return f"hot:peak_budget={asked / 2**20:.1f}MiB", asked


def measure(row: Row, device: torch.device, dtype: str) -> Iterator[list[Row]]:
    """Compiles, lets the budget be corrected, and yields; measures, and yields what it found."""
    try:
        yield from _measured(row, device, dtype)
    except Exception as error:
        traceback.print_exc()
        row.error = f"{type(error).__name__}: {str(error)[:300]}"
        yield [row]


def _measured(row: Row, device: torch.device, dtype: str) -> Iterator[list[Row]]:
    torch.manual_seed(0)
    trace_past_warnings()
    warnings.simplefilter("always", OptionWarning)
    case, config = row.case, row.config
    inner = StepperRow(case, STOCK if config.startswith((TORCH, CHECKPOINTED)) else config)
    inductor_config.compile_threads = THREADS
    if config.startswith(TORCH):
        functorch_config.activation_memory_budget = float(config.removeprefix(TORCH))
    start = time.perf_counter()
    with compiler_settings(dtype), fresh_cache():
        stepper = Stepper(inner, workload(CASES[case]), device, dtype == "bf16", CASES[case].adamw)
        if config == CHECKPOINTED:
            _checkpoint(stepper.model)
        for _ in range(WARM_UP if device.type == "cuda" else 2):
            stepper.step()
        row.compile_s = time.perf_counter() - start
        row.peak_bytes = _standing(stepper) + peak_bytes(stepper.step, device)
        row.compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other rows' processes share the device
        yield [row]
        for _ in range(ROUNDS if device.type == "cuda" else 1):
            stepper.measure(STEPS[device.type])
        row.best_ms, row.host_ms, row.loss = inner.best_ms, inner.host_ms, inner.loss
        yield [row]


def _checkpoint(model: torch.nn.Module) -> None:
    """Every block, as its library does."""
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers'
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:  # timm's
        model.set_grad_checkpointing(True)


def _standing(stepper: Stepper) -> int:
    """Bytes there between steps."""
    if stepper.device.type == "cuda":
        torch.cuda.synchronize(stepper.device)
        return torch.cuda.memory_allocated(stepper.device)
    states = stepper.optimizer.state.values() if stepper.optimizer else []
    made = [value for state in states for value in state.values()]
    model = stepper.model
    tensors = [*model.parameters(), *model.buffers(), *stepper.inputs, *made]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _rows(
    wanted: list[tuple[str, str, int]], arguments: list[str], jobs: int, limit: int
) -> Iterator[Row]:
    """Figures of (case, configuration, asked), ``jobs`` of them compiled at once."""
    for first in range(0, len(wanted), jobs):
        batch, clocks, children = wanted[first : first + jobs], [], []
        for case, config, asked in batch:
            own = ["--config", config, "--asked", str(asked)]
            child = Child(case, [*arguments, *own], __file__)
            clock = threading.Timer(limit, child.kill)
            clock.start()
            clocks.append(clock)
            children.append(child)
        said = [child.compiled() for child in children]
        for (case, config, asked), child, found in zip(batch, children, said, strict=True):
            if found and not found[0]["error"]:
                found = child.measured() or [{**found[0], "error": "it died when measured"}]
            died = {"case": case, "config": config, "asked_bytes": asked, "error": "it died"}
            yield Row(**(found[0] if found else died))
        for clock in clocks:
            clock.cancel()


def main(
    cases: Annotated[str, typer.Option(help="comma-separated, of " + ", ".join(CASES))] = ON_A_GPU,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    dtype: Annotated[str, typer.Option(help="fp32, tf32 or bf16 (autocast)")] = "bf16",
    points: Annotated[int, typer.Option(help="budgets of each case")] = 5,
    jobs: Annotated[int, typer.Option(help="processes that compile at once")] = 10,
    limit: Annotated[int, typer.Option(help="seconds that a batch of them may take")] = 480,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    config: Annotated[str, typer.Option(hidden=True)] = "",
    asked: Annotated[int, typer.Option(hidden=True)] = 0,
) -> list[Row]:
    """Measure budgets of the peak of whole steps."""
    if child:
        row = Row(child, config, asked_bytes=asked)
        answer(measure(row, torch.device(device), dtype))
        return []
    names = cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"got {', '.join(unknown)}; known are {', '.join(CASES)}")
    arguments = ["--device", device, "--dtype", dtype]
    settings: dict[str, Any] = {"dtype": dtype, "points": points, "jobs": jobs}
    where, measured = torch.device(device), []

    def run(wanted: list[tuple[str, str, int]]) -> None:
        for row in _rows(wanted, arguments, jobs, limit):
            measured.append(row)
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
            if json_file:  # each time: what was measured stays, whatever stops the rest
                write_json(json_file, where, settings, [asdict(r) for r in measured])

    on_gpu = where.type == "cuda"  # which has another memory than the host's
    first = (STOCK, LEAST, CHECKPOINTED) if on_gpu else (STOCK, LEAST)
    run([(name, config, 0) for name in names for config in first])
    for name in names:
        ends = [row for row in measured if row.case == name and not row.error]
        if [row.config for row in ends[:2]] == [STOCK, LEAST]:
            run([(name, *pair) for pair in configurations(ends, points, on_gpu)])
    said = document(where, settings, measured)
    show(budgets([said]), f"{dtype}, {said['environment']['device']}")
    return measured


if __name__ == "__main__":
    typer.run(main)
