"""Does HOT train as well, everywhere? Tasks x recipes x seeds, beside the papers' baselines.

    python benchmarks/fidelity.py run --device cuda --jobs 16          # all cells, resumable
    python benchmarks/fidelity.py run --tasks digits --recipes exact;hot --seeds 3
    python benchmarks/fidelity.py report                          # docs/measured/fidelity.md, JSON
    python benchmarks/fidelity.py restore                              # cells from that JSON
    python benchmarks/fidelity.py figures FILE.json                        # for pages.py
    python benchmarks/fidelity.py run --suite images,table2 --device cuda --jobs 14

A cell is one task trained with one recipe from one seed; its result is a line of ``cells.jsonl`` in
``--out``, and cells that are there are not run again. All cells of a task and seed start from the
same weights and see the same batches. By default the finished graphs are run node by node, on CUDA
as replays of one captured step: the arithmetic of the code that Inductor makes of them
(``--lower``) without its compile time. Suites besides ``small`` are the papers' tables on
pretrained weights and images that others know (``fidelity_real.py``), in bf16 on CUDA. Cells are
run in order of importance, so that a run that is stopped has the main ones, and the first seed of
all before the others of any. Processes share the GPUs that there are.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fidelity_cells import SUITES, Cells, figures_of, keep, scores, write_figures
from fidelity_real import REAL, as_products
from fidelity_tasks import TASKS as SMALL
from fidelity_tasks import Setting
from pages import filled
from report import environment, show
from torch._inductor.compile_fx import compile_fx_inner

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.passes.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Task
from fidelity_train import EAGER_STEPS, Training

app = typer.Typer(help=__doc__.split("\n")[0], no_args_is_help=True, add_completion=False)

TASKS = {**SMALL, **REAL}
OFF = {"memory": "off"}
PER_TOKEN = {"recipe": "paper", "per_token": True}
LOW_RANK = {"*lora_*": "hla8"}
RECIPES: dict[str, dict[str, Any]] = {
    "exact": {"recipe": "exact"},
    "hot": {"recipe": "hot", **OFF},
    "hot, memory": {"recipe": "hot"},
    "fast": {"recipe": "fast", **OFF},
    "paper": {"recipe": "paper"},
    "paper+lqs": {"recipe": "paper", "lqs": "auto"},
    "int4-naive": {"recipe": "int4-naive"},
    "luq": {"recipe": "luq"},
    "lbp-wht": {"recipe": "lbp-wht"},
    "paper, no ABC": {**PER_TOKEN, "recompute": True},
    **{f"paper, r={rank}": {**PER_TOKEN, "rank": rank} for rank in (16, 8, 4, 2, 1)},
    "8-bit forward": {"recipe": "int8-forward"},
    "LoRA factors": {"recipe": "paper", "exclude": ["*.base_layer"], "override": LOW_RANK},
    "LoRA frozen": {"recipe": "paper"},
    "LoRA both": {"recipe": "paper", "override": LOW_RANK},
}
"""Options by the name that tables show. Every layer is rewritten, whether or not it pays; tensors
that no layer reads are left alone, except in "hot, memory", the default of ``hot``, and its kin
("8-bit forward" among them)."""
OF_PAPERS = ("paper", "int4-naive", "luq", "lbp-wht")
"""Recipes, by how they begin, that see convolutions as products."""
IMPORTANCE = (
    *("exact", "hot, memory", "8-bit forward", "fast", "LoRA both", "LoRA frozen", "luq"),
    *("int4-naive", "lbp-wht", "paper, r=4", "paper, r=2", "paper, r=1", "LoRA factors", "paper"),
    *("paper, r=8", "paper, r=16", "paper+lqs", "paper, no ABC", "hot"),
)
"""The order in which they are run."""
SEEDS = 3
AT_ONCE = 3
"""Seeds of a task and recipe that one process trains, taking turns."""


Out = Annotated[Path, typer.Option(help="folder of the cells")]
Document = Annotated[Path, typer.Option(help="its marked tables are replaced")]
OUT = Path("out/fidelity")
DOCUMENT = Path("docs/measured/fidelity.md")
Group = tuple[str, str, list[int]]
"""(task, recipe, seeds) that one process trains together."""


@app.command()
def run(
    suite: Annotated[str, typer.Option(help=f"comma-separated; {', '.join(SUITES)}")] = "small",
    tasks: Annotated[str, typer.Option(help=f"comma-separated; {', '.join(TASKS)}")] = "",
    recipes: Annotated[str, typer.Option(help="separated by ';'; else the suite's")] = "",
    seeds: Annotated[int, typer.Option(help="how many; by default the suite's")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    jobs: Annotated[int, typer.Option(help="processes at once, of all GPUs together")] = 1,
    quick: Annotated[bool, typer.Option(help="tiny models for 8 steps")] = False,
    lower: Annotated[bool, typer.Option(help="generate Inductor's code")] = False,
    deadline: Annotated[float, typer.Option(help="start nothing after this many seconds")] = 1e9,
    steps: Annotated[int, typer.Option(help="by default the task's")] = 0,
    weights: Annotated[Path | None, typer.Option(help="folder of what is not installed")] = None,
    images: Annotated[
        Path | None, typer.Option(help="cifar-100-python, or a folder with train and val")
    ] = None,
    out: Out = OUT,
) -> None:
    """Train every cell that has no result yet."""
    known = [each for name in _some_of(SUITES, suite, ",") for each in SUITES[name].items()]
    names = _some_of(dict(known), tasks, ",") or list(dict(known))
    chosen = _some_of(RECIPES, recipes, ";")
    pairs = {(t, recipe): None for t, some in known if t in names for recipe in chosen or some}
    done = Cells.load(out).keys()
    groups = [group for pair in pairs for group in _groups(*pair, seeds, done)]
    groups.sort(key=lambda group: (group[2][0], IMPORTANCE.index(group[1])))
    out.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    setting = Setting(out, device, quick, weights, images, steps)
    team = Team(groups, setting, lower, threads, time.monotonic() + deadline)
    team.run(jobs)


def _some_of(known: Iterable[str], told: str, divided: str) -> list[str]:
    """The names that ``told`` lists."""
    names = [name for name in told.split(divided) if name]
    if unknown := set(names) - set(known):
        expected = divided.join(known)
        raise typer.BadParameter(f"got {sorted(unknown)}; expected some of {expected}")
    return names


def _groups(
    task: str, recipe: str, seeds: int, done: Collection[tuple[str, str, int]]
) -> list[Group]:
    """The cells of a task and recipe that are missing, in portions for one process.

    The first is alone: a run that is stopped has one seed of everything before two of anything.
    """
    count = seeds or SEEDS
    missing = [s for s in range(count) if (task, recipe, s) not in done]
    size = 1 if _observes(recipe) else AT_ONCE  # what is observed is recompiled
    rest = (missing[i : i + size] for i in range(1, len(missing), size))
    return [(task, recipe, portion) for portion in (missing[:1], *rest) if portion]


class Team:
    """Processes that train groups one after the other; one that fails is replaced."""

    def __init__(
        self, groups: list[Group], setting: Setting, lower: bool, threads: int, end: float
    ) -> None:
        cuda = setting.device.startswith("cuda")  # which does not survive a fork
        self._process = multiprocessing.get_context("spawn" if cuda else "fork").Process
        self._next = multiprocessing.get_context("spawn").Value("i", 0)
        self._groups = groups
        self._setting = setting
        self._lower = lower
        self._threads = threads
        self._start, self._end = time.monotonic(), end

    def run(self, jobs: int) -> None:
        """Until no group is left to start."""
        members = {place: self._member(place) for place in range(min(jobs, len(self._groups)))}
        while members:
            for place, member in list(members.items()):
                member.join(timeout=0.2)
                if member.exitcode is None:
                    continue
                del members[place]
                if member.exitcode != 0:
                    members[place] = self._member(place)

    def _member(self, place: int) -> Any:
        member = self._process(target=self._work, args=(place,))
        member.start()
        return member

    def _work(self, place: int) -> None:
        """What a process does: its own messages go to the log, one line a group to stderr."""
        if self._setting.device == "cuda":
            torch.cuda.set_device(place % torch.cuda.device_count())
        torch.set_num_threads(self._threads)
        torch._inductor.config.compile_threads = self._threads
        told, log = os.fdopen(os.dup(2), "w"), (self._setting.out / "log.txt").open("a")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        while (group := self._take()) is not None:
            task, recipe, seeds = group
            ending = "FAILED"
            try:
                _train_group(task, recipe, seeds, self._setting, self._lower)
                ending = "done"
            except Exception:
                print(f"{task} {recipe} {seeds}", traceback.format_exc(), file=log, flush=True)
            seconds = time.monotonic() - self._start
            print(f"{seconds:5.0f} s  {task} {recipe} {seeds}: {ending}", file=told, flush=True)
            if ending != "done":
                os._exit(1)  # a device error would spoil what comes after

    def _take(self) -> Group | None:
        with self._next.get_lock():
            place = self._next.value
            self._next.value += 1
        late = time.monotonic() > self._end
        return None if late or place >= len(self._groups) else self._groups[place]


_BOTH_LOOKS = 8
"""Steps that two looks of ``lqs="auto"`` and compiling again take, and some to spare."""


def _train_group(task: str, recipe: str, seeds: list[int], setting: Setting, lower: bool) -> None:
    """Train the seeds side by side and write their cells."""
    torch._dynamo.reset()
    start, work, reports = time.monotonic(), _task(task, recipe, setting), Reports()
    observing = _observes(recipe)
    profile = setting.out / "profiles" / f"{task}.{recipe}.{seeds[0]}.json"
    inner = compile_fx_inner if lower else run_uncompiled
    backend = _backend(recipe, work, profile, recorder=reports, inner_compile=inner)
    eager = EAGER_STEPS + (5 * _warm_up(work) + _BOTH_LOOKS if observing else 0)
    trainings = [Training(work, backend, seed, eager) for seed in seeds]
    for _ in range(work.steps):
        for training in trainings:
            training.step()
    plan = reports.graphs[-1].plan if reports.graphs else Plan(recipe, ())
    for seed, training in zip(seeds, trainings, strict=True):
        losses, score = training.finish()
        seconds = (time.monotonic() - start) / len(seeds)
        data = {
            "task": task, "recipe": recipe, "seed": seed, "options": RECIPES[recipe],
            "metric": work.metric, "score": score, "steps": work.steps,
            "held_bytes": training.held, "peak_bytes": training.peak, "lowered": lower,
            "data": str(setting.images or ""), "seconds": round(seconds, 1),
            "losses": [round(loss, 4) for loss in losses],
            "strategies": {d.site: f"{d.strategy}" for d in plan},
            "reasons": {d.site: d.reason for d in plan}, "forwards": _forwards(plan),
            "date": datetime.date.today().isoformat(), "quick": setting.quick,
            "environment": environment(work.device),
        }  # fmt: skip
        print(f"{task} {recipe} {seed}: {score:.4f}", flush=True)
        keep(setting.out, data)


def _task(task: str, recipe: str, setting: Setting) -> Task:
    """The task, its model changed where the recipe wants that."""
    work = TASKS[task](setting)
    if setting.steps:
        work = dataclasses.replace(work, steps=setting.steps)
    if recipe.startswith(OF_PAPERS):
        return dataclasses.replace(work, build=lambda: as_products(work.build()))
    return work


def _forwards(plan: Plan) -> dict[str, list[str]]:
    """With an 8-bit forward: layers by what became of their forward product, and why."""
    found: dict[str, list[str]] = {}
    for f in plan.forwards:
        found.setdefault(f.way if f.int8 else f"{f.way}: {f.reason}", []).append(f.site)
    return found


def _observes(recipe: str) -> bool:
    return HotConfig.from_options(RECIPES[recipe]).lqs == "auto"


def _warm_up(task: Task) -> int:
    """Steps before ``lqs="auto"`` looks: an eighth, so that it looks again after five eighths."""
    return task.steps // 8


def _backend(recipe: str, task: Task, profile: Path, **keywords: Any) -> Callable[..., Any]:
    """The recipe as a backend that seeds share, rewriting whatever can be."""
    options: dict[str, Any] = {**RECIPES[recipe], "min_gain": 0, "strict": True, "accept": "off"}
    if _observes(recipe):
        looks = {"lqs_warm_up": _warm_up(task), "lqs_rechecks": 1}
        options |= {"lqs": "auto", "profile": str(profile), **looks}
    return functools.partial(hot, options=options, **keywords)


@app.command()
def report(out: Out = OUT, document: Document = DOCUMENT) -> None:
    """Tables and JSON from the cells that there are, of every suite."""
    cells, said = Cells.load(out), list[str]()
    if not cells.tasks:
        raise typer.BadParameter(f"got no cells in {out}; run them first, or give --out")
    for suite, tasks in SUITES.items():
        if (some := cells.of(tasks)).tasks:
            said += write_figures(some, figures_of(document, suite))
    document.write_text(filled(document.read_text(), figures_of(document).parent))
    print(*said, sep="\n")


@app.command()
def figures(file: Path, out: Out = OUT) -> None:
    """The cells as one JSON file, which ``pages.py`` makes tables of; and one of them here."""
    said = write_figures(Cells.load(out), file)
    show(scores([json.loads(file.read_text())]), "\n".join(said))


@app.command()
def restore(out: Out = OUT, document: Document = DOCUMENT) -> None:
    """Cells from the report's JSON, where there are none: to go on from a published run."""
    done = Cells.load(out).keys()
    files = [figures_of(document, suite) for suite in SUITES]
    published = (json.loads(file.read_text())["rows"] for file in files if file.exists())
    for row in (row for rows in published for row in rows):
        if (row["task"], row["recipe"], row["seed"]) not in done:
            keep(out, {**row, "losses": [], "strategies": {}, "reasons": {}})


if __name__ == "__main__":
    torch._dynamo.config.recompile_limit = 64
    app()
