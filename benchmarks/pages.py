"""Fills the tables of the measured pages from the JSON that the benchmarks wrote.

    python benchmarks/pages.py            # rewrite them
    python benchmarks/pages.py --check    # fail if a page says other than its JSON

A table stands between ``<!-- steps: FILE.json, ... -->`` and ``<!-- end -->``; the first word names
one of ``TABLES``, the files lie in ``docs/benchmarks``. Of cases that several files have, the last
one's figures count. Everything else on a page is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from budget import STOCK, TORCH, Row, at_peak

ROOT = Path(__file__).parents[1]
PAGES = ("docs/measured/against_stock.md", "docs/budget.md")
FIGURES = ROOT / "docs" / "benchmarks"
MARKED = re.compile(r"(<!-- (\w+): ([\w., ]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
NAMES = {
    "gpt2": "GPT-2 124M, 8 × 1024, logits returned",
    "gpt2-loss": "the same, loss only",
    "vit-b-256": "ViT-B/16, batch 256, AdamW",
    "vit-b-128": "ViT-B/16, batch 128",
    "llama6x2048": "Llama 6 × 2048, 4 × 2048 tokens",
    "llama12x2048": "Llama 12 × 2048, 8 × 2048 tokens, AdamW",
    "qwen3": "Qwen3-like, 4 × 1024, vocabulary 152k, 4 × 2048",
    "resnet50-256": "ResNet-50, batch 256, AdamW",
    "mixer-b-128": "MLP-Mixer B/16, batch 128",
    "convnext-t-128": "ConvNeXt-T, batch 128",
    "swin-t-128": "Swin-T, batch 128",
    "bert": "BERT, masked words, 32 × 512",
}
MIB = 2**20


def steps(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """``against_stock.py``'s rows: each figure, and time and peak against the case's first."""
    head = ("model", "", "ms", "speed", "host ms", "launches", "peak MiB", "of stock's")
    made = [(*head, "compile s"), ("---",) * 2 + ("---:",) * 7]
    for row in rows:
        stock = next(other for other in rows if other["case"] == row["case"])
        first = row is stock
        made.append(
            (
                NAMES[row["case"]] if first else "",
                row["config"] if first else f"**{row['config']}**",
                f"{row['best_ms']:.1f}",
                "" if first else f"{stock['best_ms'] / row['best_ms']:.2f}×",
                f"{row['host_ms']:.1f}",
                str(row["launches"]),
                f"{row['peak_bytes'] / MIB:.0f}",
                "" if first else f"{row['peak_bytes'] / stock['peak_bytes']:.2f}",
                f"{row['compile_s']:.0f}",
            )
        )
    return made


def budgets(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """``budget.py``'s rows with a budget, beside torch's own at the same peak."""
    head = ("model", "MiB asked", "peak", "of asked", "ms", "torch's ms at that peak")
    made = [head, ("---", *("---:",) * 5)]
    measured = [Row(**row) for row in rows if not row["error"] and row["best_ms"] < float("inf")]
    for case in dict.fromkeys(row.case for row in measured if row.asked_bytes):
        mine = [row for row in measured if row.case == case]
        least = min(row.peak_bytes for row in mine if row.config.startswith(TORCH))
        for row in mine:
            peak, ms = f"{row.peak_bytes / MIB:.0f}", f"{row.best_ms:.1f}"
            if row.config == STOCK:
                made.append((f"{NAMES[case]}: stock", "", peak, "", ms, ""))
            if row.asked_bytes:
                theirs = at_peak(mine, row.peak_bytes)
                said = f"its least is {least / MIB:.0f}" if theirs is None else f"{theirs:.1f}"
                share = f"{row.peak_bytes / row.asked_bytes:.2f}"
                made.append(("", f"{row.asked_bytes / MIB:.0f}", peak, share, ms, said))
    return made


TABLES: dict[str, Callable[[list[dict[str, Any]]], list[tuple[str, ...]]]] = {
    "steps": steps,
    "budgets": budgets,
}


def filled(page: str) -> str:
    """``page`` with its marked tables made anew."""

    def table(match: re.Match[str]) -> str:
        known: dict[str, list[dict[str, Any]]] = {}
        for name in match[3].split(","):
            cases: dict[str, list[dict[str, Any]]] = {}
            for row in json.loads((FIGURES / name.strip()).read_text(encoding="utf-8"))["rows"]:
                cases.setdefault(row["case"], []).append(row)
            known |= cases
        lines = TABLES[match[2]]([row for rows in known.values() for row in rows])
        return match[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines) + match[4]

    return MARKED.sub(table, page)


def main(
    check: Annotated[bool, typer.Option(help="write nothing; fail if a page differs")] = False,
) -> None:
    """Fill the tables of the measured pages."""
    for page in (ROOT / name for name in PAGES):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if check and after != before:
            sys.exit(f"{page.relative_to(ROOT)} is not what its JSON gives: run {sys.argv[0]}")
        if not check:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
