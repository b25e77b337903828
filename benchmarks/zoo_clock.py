"""Steps of the zoo's models by the clock, at batches that fill a share of a device.

    python benchmarks/zoo_clock.py --models transformers:phi3,transformers:qwen3,timm:davit --fill 7

What ``zoo.py`` times are kernels of small batches, for which a host takes longer than its device.
Here a model's batch is what eager PyTorch takes ``fill`` GiB for. All models compile at once, a
process each; none is timed before all are done, or ``--wait`` is over, which stops the others; and
then one by one, stock and hot in turns. So are Triton's configurations and images' layouts: of a
kernel that is timed beside others' work the wrong one may be taken, which was seen to cost five
times what the right one does. Hot measures its steps while its model has the device alone, and is
compiled again there if they wait for their host, as in any run that lasts. ``first`` is the first
step, with caches as they are. A model's row is written as soon as it was timed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import zoo_models
import zoo_others
from filelock import FileLock
from report import show, write_json
from step import compiler_settings, synchronize
from tables import Lines
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from zoo_measure import Arm, brief

from hot_compile import certificate
from hot_compile.backend import hot
from hot_compile.memory import peak_bytes
from hot_compile.observing import acceptance
from hot_compile.passes.cost import images

ROUNDS, STEPS, WARM_UP = 6, 4, 100
acceptance.LASTS = 0.0  # what steps take is followed at once
SMALL, MOST = 8, 2048
"""Samples that the share is found by, and the most there may be."""
TOKENS = 256


@dataclass
class Row:
    """One model: stock's figures, then hot's."""

    name: str
    batch: int = 0
    ms: tuple[float, float] = (0.0, 0.0)
    host_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    first_s: tuple[float, float] = (0.0, 0.0)
    certificate: str = ""
    """What looks found, if there were any."""
    repaired: dict[str, str] = field(default_factory=dict)
    """What they made more exact, and how."""
    error: str = ""


class Timed(Arm):
    """The model compiled in one way, and its figures."""

    best = host = float("inf")
    first = 0.0

    def compile(self) -> None:
        """The first step."""
        begin = time.perf_counter()
        self.step()
        synchronize(self.device)
        self.first = time.perf_counter() - begin

    def round(self) -> None:
        """Steps one behind the other."""
        synchronize(self.device)
        begin = time.perf_counter()
        self.step()
        self.host = min(self.host, time.perf_counter() - begin)
        for _ in range(STEPS - 1):
            self.step()
        synchronize(self.device)
        self.best = min(self.best, (time.perf_counter() - begin) / STEPS)


def tune(alone: FileLock) -> None:
    """From now on this process times Triton's configurations, and images' layouts, while it holds
    ``alone``."""
    for owner, name in ((CachingAutotuner, "benchmark_all_configs"), (images, "timed")):
        setattr(owner, name, _held(alone, getattr(owner, name)))


def _held(alone: FileLock, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with alone.acquire(poll_interval=0.005):
            return own(*args, **kwargs)

    return timed


def built_by(
    make: Callable[[], zoo_models.Built], batch: int, device: torch.device, bf16: bool = False
) -> zoo_models.Built:
    """A model of so many samples a step, on that device; its weights in 32 bits, or in 16."""
    zoo_models.scale = zoo_others.scale = lambda: (batch, TOKENS)
    torch.manual_seed(0)
    with device:
        built = make()
    if bf16:
        built.model.to(torch.bfloat16)
    return built


def _batch(build: Callable[[int], zoo_models.Built], device: torch.device, fill: float) -> int:
    """Samples of which a step of eager PyTorch's takes ``fill`` GiB, or eight."""
    arm = Arm(build(SMALL), None, device)
    arm.step()
    return max(SMALL, min(MOST, int(SMALL * fill * 2**30 / peak_bytes(arm.step, device))))


def _compiled(
    row: Row,
    device: torch.device,
    fill: float,
    bf16: bool,
    options: dict[str, Any],
    alone: FileLock,
) -> list[Timed]:
    """Stock's and hot's."""
    make = zoo_models.every_model()[row.name]

    def build(batch: int) -> zoo_models.Built:
        return built_by(make, batch, device, bf16)

    with alone:
        row.batch = _batch(build, device, fill)
    built = build(row.batch)
    ours = functools.partial(hot, options=options)
    arms = [Timed(built, backend, device) for backend in ("inductor", ours)]
    for arm in arms:
        arm.compile()
    for _ in range(SMALL):
        arms[1].step()  # it looks at some, and may compile again; no step is timed by it so early
    return arms


def _time(row: Row, stock: Timed, own: Timed) -> None:
    for _ in range(WARM_UP if own.device.type == "cuda" else 0):
        own.step()
    for arm in (stock, own):
        arm.peak = peak_bytes(arm.step, arm.device)
    for _ in range(ROUNDS):
        for arm in (stock, own):
            arm.round()
    row.ms, row.host_ms = (1e3 * stock.best, 1e3 * own.best), (1e3 * stock.host, 1e3 * own.host)
    row.peak_bytes, row.first_s = (stock.peak, own.peak), (stock.first, own.first)
    with contextlib.suppress(TypeError):  # nothing looks at it
        found = certificate(own.forward)
        row.certificate, row.repaired = str(found), dict(found.repaired)


def _one(
    name: str, device: str, fill: float, dropout: bool, bf16: bool, options: dict[str, Any],
    said: Any, ready: Any, all_done: Any, gate: Path,
) -> None:  # fmt: skip
    zoo_models.draws = lambda: dropout
    # a backward's kernels are tuned in a thread of its own, while the step's thread holds it
    alone = FileLock(gate, thread_local=False)
    tune(alone)
    row, arms = Row(name), list[Timed]()
    with compiler_settings("fp32"):
        try:
            arms = _compiled(row, torch.device(device), fill, bf16, options, alone)
        except Exception as error:
            row.error = brief(error)
        ready.put(name)
        all_done.wait()
        try:
            with alone:
                if arms:
                    _time(row, *arms)
        except Exception as error:
            row.error = brief(error)
    said.put(row)


def _in_time(ready: Any, count: int, wait: float) -> set[str]:
    """Models that are compiled, or failed, within so many seconds."""
    names, end = set[str](), time.monotonic() + wait
    with contextlib.suppress(queue.Empty):
        while len(names) < count:
            names.add(ready.get(timeout=max(0.0, end - time.monotonic())))
    return names


def lines(rows: list[Row]) -> Lines:
    """A table, models in the order of how much faster hot is."""
    head = ("model", "batch", "stock ms", "hot ms", "speed", "peak MiB", "of stock's", "first s")
    found = [head]
    for row in sorted((r for r in rows if not r.error), key=lambda r: r.ms[1] / r.ms[0]):
        (stock, own), (whole, held) = row.ms, row.peak_bytes
        found.append((
            row.name, str(row.batch), f"{stock:.2f}", f"{own:.2f}", f"{stock / own:.2f}",
            f"{held >> 20}", f"{held / max(1, whole):.2f}",
            f"{row.first_s[0]:.0f} -> {row.first_s[1]:.0f}",
        ))  # fmt: skip
    return found


def main(
    models: Annotated[str, typer.Option(help="names, with commas")],
    device: str = "cuda",
    fill: Annotated[float, typer.Option(help="GiB that a step by eager PyTorch takes")] = 7.0,
    dropout: Annotated[bool, typer.Option(help="as models have it, not 0")] = False,
    bf16: Annotated[bool, typer.Option(help="weights in bf16, as some are fine-tuned")] = False,
    accept: Annotated[str, typer.Option(help="hot's option")] = "auto",
    wait: Annotated[float, typer.Option(help="seconds, for what still compiles")] = 3600.0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> list[Row]:
    """Time the models named."""
    names = models.split(",")
    if unknown := set(names) - zoo_models.every_model().keys():
        raise typer.BadParameter(f"got {sorted(unknown)}; zoo.py run lists what there is")
    context = multiprocessing.get_context("spawn")
    said, ready, all_done = context.Queue(), context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "device.lock"
        given = device, fill, dropout, bf16, {"accept": accept}, said, ready, all_done, gate
        processes = {
            name: context.Process(target=_one, args=(name, *given), daemon=True) for name in names
        }
        for process in processes.values():
            process.start()
        compiled = _in_time(ready, len(processes), wait)
        late = [name for name in processes if name not in compiled]
        for name in late:
            processes[name].kill()
            processes[name].join()
        print(f"{len(compiled)} of {len(processes)} compiled; they are timed now", flush=True)
        all_done.set()
        untimed = (Row(name, error=f"not compiled within {wait:g} s (--wait)") for name in late)
        arguments = {"fill": fill, "dropout": dropout, "bf16": bf16, "accept": accept}
        rows = list[Row]()
        for row in itertools.chain(untimed, (said.get() for _ in compiled)):
            rows.append(row)
            if row.error or row.certificate:
                print(f"{row.name}: {row.error or row.certificate}", flush=True)
            if json_file:  # now: whoever stops the program has what was timed so far
                write_json(json_file, torch.device(device), arguments, list(map(asdict, rows)))
    show(lines(rows), f"steps that fill {fill:g} GiB by eager PyTorch")
    return rows


if __name__ == "__main__":
    typer.run(main)
