"""Tables of the 8-bit forwards: how models train with them, and which layers have one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fidelity_cells import EIGHT_BITS, LOWER_IS_BETTER, NAMES, Cells, mean_spread, score_of

if TYPE_CHECKING:
    from tables import Document, Lines


_BYTES = ("MiB held", "MiB peak")


def eight_bits(documents: list[Document]) -> Lines:
    """``fidelity.py``: a task's scores, and their difference to exact in percent of it, by seed."""
    cells, others = _cells(documents), EIGHT_BITS[1:]
    lines: Lines = [("task", *EIGHT_BITS, *(f"{name}: better than exact by, %" for name in others))]
    for task in cells.tasks:
        lower = any(c.metric in LOWER_IS_BETTER for c in cells.get(task, "exact"))
        scores = (score_of(cells.get(task, recipe)) for recipe in EIGHT_BITS)
        better = (mean_spread(cells.relative(task, recipe), 100) for recipe in others)
        lines.append((f"{task}, {'loss' if lower else '%'}", *scores, *better))
    return lines


def forwards(documents: list[Document]) -> Lines:
    """``fidelity.py``: of how many layers the forward is on INT8, and why not of the others."""
    cells = _cells(documents)
    lines: Lines = [("task", "layers on INT8", "exact", "why")]
    for task in cells.tasks:
        found = [c.raw.get("forwards", {}) for c in cells.get(task, "8-bit forward")]
        for plan in (each for n, each in enumerate(found) if each not in found[:n]):
            ways = Counter({way: len(layers) for way, layers in plan.items()})
            left = {way.removeprefix("exact: "): n for way, n in ways.items() if ": " in way}
            why = "; ".join(f"{n} × {reason}" for reason, n in left.items())
            exact = sum(left.values())
            lines.append((task, str(ways.total() - exact), str(exact), why))
    return lines


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
