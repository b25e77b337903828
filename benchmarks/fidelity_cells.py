"""Results of the fidelity suite: one a task, recipe and seed."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tables import Document, Lines

LOWER_IS_BETTER = {"loss"}
_BYTES = ("MiB held", "MiB peak")
FILE = "cells.jsonl"
"""Of a folder: a line a cell, in the order in which they were finished."""

NAMES = {
    "exact": "exact",
    "int4-naive": "INT4",
    "luq": "LUQ",
    "lbp-wht": "LBP-WHT",
    "paper": "HOT as in the paper",
    "hot, memory": "the default",
    "fast": "fast",
    "8-bit forward": "8-bit forward",
}
"""Columns of table 4, by recipe: the papers' methods, then ours."""
_MODELS = ("resnet18", "resnet34", "resnet50", "efficientformer_l1", "efficientformer_l3", "vit")
IMAGES = tuple(f"images-{name}" for name in _MODELS)
SUITES: dict[str, dict[str, tuple[str, ...]]] = {
    "small": dict.fromkeys(("digits", "char-gpt", "two-digits"), tuple(NAMES)),
    "images": {name: tuple(NAMES) for name in IMAGES},
    "text": {
        "smollm2": ("exact", "hot, memory", "8-bit forward", "fast", "luq", "paper"),
        "smollm2-checkpointed": ("exact", "hot, memory", "8-bit forward"),
        "minilm": tuple(NAMES),
    },
    "table1": {"minilm": ("exact", "paper, no ABC", "paper, r=8", "paper+lqs", "paper")},
    "table2": {"images-vit": ("exact", *(f"paper, r={rank}" for rank in (16, 8, 4, 2, 1)))},
    "table3": {"smollm2-lora": (
        *("exact", "LoRA factors", "LoRA frozen", "LoRA both", "hot, memory", "8-bit forward"),
    )},
}  # fmt: skip
"""What is run for each task. ``small`` needs nothing that is not installed; the others are the
papers' tables: the shape of table 4, on images and on what was pretrained; and tables 1 (ABC, LQS
one by one), 2 (ranks) and 3 (LoRA)."""


def keep(out: Path, data: dict[str, Any]) -> None:
    """Add one cell to the folder's; processes may do so at once."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / FILE).open("ab", buffering=0) as file:
        file.write(json.dumps(data).encode() + b"\n")  # one write: lines do not mix


@dataclass(frozen=True)
class Cell:
    """One run's result."""

    task: str
    recipe: str
    seed: int
    metric: str
    score: float
    held_bytes: int
    raw: dict[str, Any]


class Cells:
    """All results, by task and recipe and seed."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._cells: dict[str, dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
        fields = ("task", "recipe", "seed", "metric", "score", "held_bytes")
        for raw in rows:
            cell = Cell(*(raw[name] for name in fields), raw)
            self._cells[cell.task][cell.recipe][cell.seed] = cell

    @classmethod
    def load(cls, out: Path) -> Cells:
        """Every cell of the folder."""
        file = out / FILE
        return cls(map(json.loads, file.read_text().splitlines() if file.exists() else ()))

    def of(self, suite: dict[str, tuple[str, ...]]) -> Cells:
        """Those that a suite runs, in its order."""
        order = [(task, recipe) for task, recipes in suite.items() for recipe in recipes]
        some = [c for c in self.all() if (c.task, c.recipe) in order]
        some.sort(key=lambda c: (order.index((c.task, c.recipe)), c.seed))
        return Cells(c.raw for c in some)

    @property
    def tasks(self) -> list[str]:
        """Tasks that have results."""
        return list(self._cells)

    def get(self, task: str, recipe: str) -> list[Cell]:
        """By seed."""
        return [cell for _, cell in sorted(self._cells[task][recipe].items())]

    def recipes(self, task: str) -> list[str]:
        """That it was trained with, exact first."""
        return sorted(self._cells[task], key=lambda recipe: recipe != "exact")

    def relative(self, task: str, recipe: str) -> list[float]:
        """Per seed: how much better than exact, relative to it (negative: worse)."""
        exact = {cell.seed: cell.score for cell in self.get(task, "exact")}
        found = []
        for cell in self.get(task, recipe):
            if exact.get(cell.seed):  # eight steps may have learned nothing
                gain = cell.score / exact[cell.seed] - 1
                found.append(-gain if cell.metric in LOWER_IS_BETTER else gain)
        return found

    def keys(self) -> set[tuple[str, str, int]]:
        """Of every cell: its task, recipe and seed."""
        return {(cell.task, cell.recipe, cell.seed) for cell in self.all()}

    def all(self) -> list[Cell]:
        """Every cell."""
        return [c for t in self._cells.values() for r in t.values() for c in r.values()]

    def rows(self) -> list[dict[str, Any]]:
        """What a report's JSON keeps of each."""
        left_out = ("losses", "reasons", "strategies")
        return [{k: v for k, v in c.raw.items() if k not in left_out} for c in self.all()]


def mean_spread(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    mean = statistics.fmean(values) * scale
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    spread = statistics.stdev(values) * scale
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def score_of(cells: list[Cell]) -> str:
    """Of one task and recipe, over the seeds: a loss, or an accuracy in percent."""
    lower = bool(cells) and cells[0].metric in LOWER_IS_BETTER
    return mean_spread([c.score for c in cells], 1 if lower else 100, 3 if lower else 2)


def figures_of(document: Path, suite: str = "") -> Path:
    """A suite's JSON of docs/measured/fidelity.md: docs/benchmarks/fidelity.json, or of a name."""
    name = "_".join(filter(None, (document.stem, suite)))
    return document.parents[1] / "benchmarks" / f"{name}.json"


def write_figures(cells: Cells, file: Path) -> list[str]:
    """All cells' figures as one JSON file; says what was run where and when."""
    rows = cells.rows()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    runs = Counter(map(_run_of, rows))
    said = (f"  {count} cells: {', '.join(run)}" for run, count in runs.items())
    return [f"{len(rows)} cells: {file}", *said]


def _run_of(row: dict[str, Any]) -> tuple[str, ...]:
    """When, where and with what it was run."""
    environment = row.get("environment", {})
    return (row.get("date", "no date"), *(f"{environment.get(k)}" for k in ("device", "torch")))


def scores(documents: list[Document]) -> Lines:
    """``fidelity.py``: tasks by recipes, each beside exact by seed; bytes of one step."""
    cells = _cells(documents)
    lines: Lines = [("task", "recipe", "score", "better than exact by, %", "seeds", *_BYTES)]
    for task in cells.tasks:
        unit = ""
        for recipe in cells.recipes(task):
            found, gain = cells.get(task, recipe), mean_spread(cells.relative(task, recipe), 100)
            name = "" if unit else task
            unit = "loss" if found[0].metric in LOWER_IS_BETTER else "%"
            sizes = (found[0].held_bytes, found[0].raw.get("peak_bytes", 0))
            each = (f"{size / 2**20:.0f}" if size else "" for size in sizes)
            gain = "" if recipe == "exact" else gain
            lines.append((name, recipe, f"{score_of(found)} {unit}", gain, str(len(found)), *each))
    return lines


def papers(documents: list[Document]) -> Lines:
    """``fidelity.py``: the shape of the papers' table 4, models by methods."""
    cells = _cells(documents)
    lines: Lines = [("model", *NAMES.values(), "seeds")]
    for task in cells.tasks:
        scores = (score_of(cells.get(task, recipe)) for recipe in NAMES)
        seeds = max(len(cells.get(task, recipe)) for recipe in NAMES)
        lines.append((task.removeprefix("images-"), *scores, str(seeds)))
    return lines


def _cells(documents: list[Document]) -> Cells:
    return Cells(row for document in documents for row in document["rows"])
