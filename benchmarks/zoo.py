"""Models of every family, a few steps of training each: gradients beside exact ones, and bytes.

    python benchmarks/zoo.py run                      # one of every module of timm, every
                                                      # architecture of transformers, and more
    python benchmarks/zoo.py run --only 'timm:swin*,*:bert'       # some of them
    python benchmarks/zoo.py run --device cuda --jobs 14 --budget-seconds 480
    python benchmarks/zoo.py page --device cuda       # the page's table from the results

Each model trains some steps of SGD by eager PyTorch, so that its gradients are not those of an
initialisation; then one step by "hot" is compared with eager's from the same weights. Dropout is
off: masks would differ. On a CPU graphs run uncompiled, with ``min_gain=0``, unless ``--lower`` has
Inductor compile them. On a GPU, or with ``--lower``, they are timed beside stock, one after the
other (``zoo_measure.py``).

Results are added to a file line by line: what is there already is not run again, a process that
dies costs one model, and what time cuts short is begun anew by the next run.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from zoo_measure import OF_MEMORY, Result, measured
from zoo_models import Built, every_model
from zoo_page import filled

ROOT = Path(__file__).parent.parent
LEAST = 60
"""Seconds that must be left for another model to be begun."""
app = typer.Typer(help=__doc__, add_completion=False)
console = Console()
Device = Annotated[str, typer.Option(help="cpu, or cuda: compiled, beside stock")]


def known(path: Path) -> dict[str, Result]:
    """Results of an earlier run, by name; what lacked memory is none."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return {row["name"]: Result(**row) for row in rows if OF_MEMORY not in row["error"]}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How models are run."""

    device: torch.device
    lower: bool
    out: Path
    tree: str

    def write(self, result: Result) -> None:
        """Add a line to the file, and one to the terminal."""
        result.tree = self.tree
        with self.out.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        console.print(_line(result), markup=False, highlight=False, soft_wrap=True)

    def one(self, name: str, threads: int) -> None:
        """One model, in this process, whose own messages go to a log."""
        log = self.out.with_suffix(".log").open("a")
        told = os.dup(1)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        torch.set_num_threads(threads)
        torch._inductor.config.compile_threads = threads
        result = self._tried(name, every_model()[name])
        os.dup2(told, 1)
        self.write(result)

    def _tried(self, name: str, make: Callable[[], Built]) -> Result:
        try:
            return measured(name, make, self.device, self.lower, self.out.with_suffix(".lock"))
        except Exception as error:
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return Result(name, error=f"{text[:160]} ({Path(last.filename).name}:{last.lineno})")


@app.command()
def run(
    only: Annotated[str, typer.Option(help="names or globs, with commas")] = "*",
    device: Device = "cpu",
    lower: Annotated[bool, typer.Option(help="on a CPU: compile by Inductor")] = False,
    out: Annotated[Path | None, typer.Option(help="results, one a line")] = None,
    seconds: Annotated[int, typer.Option(help="the most that one model may take")] = 300,
    jobs: Annotated[int, typer.Option(help="models at once")] = 1,
    budget_seconds: Annotated[float, typer.Option(help="what is unfinished then is left")] = 1e9,
) -> None:
    """Run what has no result yet, each model in a process of its own."""
    end = time.monotonic() + budget_seconds
    where = torch.device(device)
    setting = Setting(where, lower or where.type != "cpu", out or _results(where), _commit())
    setting.out.parent.mkdir(parents=True, exist_ok=True)
    models, done = every_model(), known(setting.out)
    wanted = {n: m for n, m in models.items() if any(fnmatchcase(n, g) for g in only.split(","))}
    if not wanted:
        raise typer.BadParameter(f"got --only {only!r}; it matches none of {list(models)}")
    todo = {name: make for name, make in wanted.items() if name not in done}
    console.print(f"{len(wanted)} models, {len(wanted) - len(todo)} of them known")
    _run(setting, list(todo), jobs, seconds, end)


def _run(setting: Setting, waiting: list[str], jobs: int, seconds: float, end: float) -> None:
    """A process a model."""
    process = multiprocessing.get_context(_start_method(setting.device)).Process
    threads = max(1, (os.cpu_count() or 1) // jobs)
    running = dict[Any, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() + LEAST < end:
            name = waiting.pop(0)
            child = process(target=setting.one, args=(name, threads))
            child.start()
            running[child] = (name, time.monotonic() + seconds)
        if not running:
            console.print(f"{len(waiting)} models are left for another run")
            return
        time.sleep(0.1)
        for child, (name, limit) in list(running.items()):
            late = time.monotonic() > min(limit, end)
            if child.is_alive() and not late:
                continue
            del running[child]
            if child.is_alive():
                child.kill()
                if time.monotonic() > limit:
                    setting.write(Result(name, error=f"took more than {seconds:.0f} s"))
            elif child.exitcode:
                setting.write(Result(name, error=f"its process died: {child.exitcode}"))


def _start_method(device: torch.device) -> str:
    """Forked processes have everything imported; but where a library has asked the driver for GPUs
    as it was imported (``PYTORCH_NVML_BASED_CUDA_CHECK=1`` has torch ask NVML) none can use one."""
    trial = multiprocessing.get_context("fork").Process(
        target=torch.zeros, args=(1,), kwargs={"device": device}
    )
    trial.start()
    trial.join()
    return "spawn" if trial.exitcode else "fork"


def _results(device: torch.device) -> Path:
    return ROOT / "out" / f"zoo_{device.type}.jsonl"


def _commit() -> str:
    """Of the tree that this file lies in, with a plus if something in it is changed."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        told = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return told.stdout.strip()


def _line(r: Result) -> str:
    if r.error:
        return f"{r.name:34s} {r.error}"
    share = r.held / max(1, r.uncompressed)
    said = (
        f"{r.name:34s} {r.rewritten:3d}/{r.products:3d}  held {share:4.0%} of "
        f"{r.uncompressed / 1e6:7.1f} MB  cosines {r.worst:.3f} {r.percentile:.3f} {r.median:.4f}"
        f"  {r.seconds:4.0f} s"
    )
    if not r.stock_peak:
        return said
    kernels = f"kernels {r.hot_kernels_ms:.1f} of {r.stock_kernels_ms:.1f} ms"
    return f"{said}  {kernels}, peak {r.hot_peak / r.stock_peak:.2f}"


@app.command()
def page(
    results: Annotated[Path | None, typer.Option(help="what run wrote")] = None,
    out: Annotated[Path | None, typer.Option(help="the page, with a place for its table")] = None,
    device: Device = "cpu",
) -> None:
    """Fill the table of a page of docs from the results."""
    where = torch.device(device)
    rows = list(known(results or _results(where)).values())
    out = out or ROOT / "docs" / "measured" / ("zoo.md" if where.type == "cpu" else "zoo_cuda.md")
    out.write_text(filled(out.read_text(), rows))
    console.print(f"{out}: {len(rows)} models", markup=False)


if __name__ == "__main__":
    app()
