"""Tables and pictures of the fidelity suite, from its cells."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fidelity_cells import Cells, mean_spread, score_of

from hot_compile.config import RECIPES, HotConfig, Strategy
from hot_compile.passes.profile import lqs
from hot_compile.passes.profile.profile import LayerProfile, Profile

RANKS = (16, 8, 4, 2, 1)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def main_table(cells: Cells, recipes: Iterable[str]) -> str:
    """Supplementary table 4's shape: recipes by tasks, mean and spread over seeds."""
    tasks = cells.tasks
    units = {t: cells.get(t, "exact")[0].metric for t in tasks if cells.get(t, "exact")}
    header = ["recipe", *(f"{t}, {'%' if units.get(t) == 'accuracy' else 'loss'}" for t in tasks)]
    rows = [[r, *(score_of(cells.get(t, r)) for t in tasks)] for r in recipes]
    return _table(header, [row for row in rows if any(row[1:])])


def relative_table(cells: Cells, recipes: Iterable[str]) -> str:
    """The same, relative to exact in percent, paired by seed; negative is worse."""
    rows = [
        [r, *(mean_spread(cells.relative(t, r), 100) for t in cells.tasks)]
        for r in recipes
        if r != "exact"
    ]
    return _table(["recipe", *cells.tasks], [row for row in rows if any(row[1:])])


def increments_table(cells: Cells) -> str:
    """Supplementary table 1's shape: HOT, then ABC, then LQS."""
    task = "glyph-tune"
    rows = []
    names = {"exact": "exact", "paper, no ABC": "HOT, scales per token", "paper, r=8": "+ ABC"}
    names |= {"paper+lqs": "+ ABC + LQS", "paper": "ABC, scales per tensor (no LQS)"}
    for recipe, name in names.items():
        if found := cells.get(task, recipe):
            rows.append([name, f"{found[0].held_bytes / 1e6:.1f}", score_of(found)])
    return _table(["method", "MB held", "accuracy, %"], rows)


def rank_table(cells: Cells) -> str:
    """Supplementary table 2's shape: HLA's rank."""
    rows = [["exact", score_of(cells.get("glyph-scratch", "exact"))]]
    for rank in RANKS:
        name = f"{rank} (full rank)" if rank == 16 else str(rank)
        rows.append([name, score_of(cells.get("glyph-scratch", f"paper, r={rank}"))])
    return _table(["rows kept of 16", "accuracy, %"], rows)


def lora_table(cells: Cells) -> str:
    """Supplementary table 3's shape: HOT on frozen weights, on the low-rank factors, on both."""
    rows = []
    for frozen, factors, recipe in (
        ("no", "no", "exact"), ("no", "yes", "LoRA factors"),
        ("yes", "no", "LoRA frozen"), ("yes", "yes", "LoRA both"),
    ):  # fmt: skip
        rows.append([frozen, factors, score_of(cells.get("lora", recipe))])
    return _table(["HOT on frozen weights", "HOT on low-rank factors", "accuracy, %"], rows)


def choice_table(cells: Cells, out: Path, task: str = "glyph-scratch") -> str | None:
    """What LQS measured of each layer, and what it chooses by it; None where nothing was kept."""
    path, trained = out / "profiles" / f"{task}.fast.0.json", cells.get(task, "fast")
    if not path.exists() or not trained:
        return None
    left_alone = {name for name, s in trained[0].raw["strategies"].items() if s == "exact"}
    rows = []
    for name, layer in Profile.load(path).layers.items():
        if name in left_alone:
            continue
        errors = [layer.grad_weight.get(v) for v in ("hla8/batch", "int8")]
        row = [name, *("" if e is None else f"{e.error:.3f}" for e in errors)]
        row.append(f"{layer.token_error:.4f} / {layer.tensor_error:.4f}")
        row += [str(_choice(layer, RECIPES[recipe])) for recipe in ("hot", "fast")]
        row.append("per token" if lqs.per_token(layer, RECIPES["paper"]) else "per tensor")
        rows.append(row)
    header = ["layer", "g_w error hla8", "int8", "g_y error per token / tensor"]
    return _table([*header, "hot", "fast", "paper"], rows)


def _choice(layer: LayerProfile, config: HotConfig) -> Strategy:
    """The strategy that what was measured allows, whatever it gains."""
    tried = lqs.candidates(config, layer)
    allowed = (s for s in tried if lqs.over_budget(layer, config, s, bits=8) is None)
    return next(allowed, Strategy.EXACT)


def plot(cells: Cells, recipes: Iterable[str], path: Path) -> None:
    """Every recipe's difference to exact, task by task, one dot a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [r for r in recipes if r != "exact" and any(cells.get(t, r) for t in cells.tasks)]
    figure, axes = plt.subplots(
        1, len(cells.tasks), figsize=(3 * len(cells.tasks), 4), sharey=True, squeeze=False
    )
    for axis, task in zip(axes[0], cells.tasks, strict=True):
        for y, recipe in enumerate(names):
            values = [100 * v for v in cells.relative(task, recipe)]
            axis.plot(values, [y] * len(values), "o", alpha=0.7)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xscale("symlog", linthresh=1)
        axis.set(title=task, xlabel="% against exact", xlim=(-80, 8))
        axis.set_yticks(range(len(names)), names)
        axis.grid(alpha=0.3)
    axes[0][0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def figures_of(document: Path, suite: str = "") -> Path:
    """A suite's JSON of docs/measured/fidelity.md: docs/benchmarks/fidelity.json, or of a name."""
    name = "_".join(filter(None, (document.stem, suite)))
    return document.parents[1] / "benchmarks" / f"{name}.json"


def write_report(cells: Cells, out: Path, document: Path, recipes: Sequence[str]) -> list[str]:
    """Replace the marked tables of the document; write its picture beside it, and its JSON."""
    tables = {
        "main": main_table(cells, recipes),
        "relative": relative_table(cells, recipes),
        "table1": increments_table(cells),
        "table2": rank_table(cells),
        "table3": lora_table(cells),
        "choice": choice_table(cells, out),
    }
    text = document.read_text() if document.exists() else "\n".join(map(_marked, tables))
    for name, table in tables.items():
        if table is None:
            continue
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    document.write_text(text)
    picture = document.with_suffix(".png")
    plot(cells, recipes, picture)
    said = write_figures(cells, figures_of(document))
    known = [table for table in tables.values() if table is not None]
    return [f"{document}, {picture}", *said, *known]


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


def _marked(name: str) -> str:
    return f"<!-- table {name} -->\n<!-- end -->\n"
