"""Fills the tables of the measured pages from the JSON that the benchmarks wrote.

    python benchmarks/pages.py            # rewrite them
    python benchmarks/pages.py --check    # fail if a page says other than its JSON

A table stands between ``<!-- steps: FILE.json, ... -->`` and ``<!-- end -->``; the first word names
one of ``tables.TABLES``, the files lie in ``docs/benchmarks``. Everything else on a page is written
by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from tables import TABLES, Lines, numbers

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "benchmarks"
MARKED = re.compile(
    rf"(<!-- ({'|'.join(TABLES)}): ([\w.,\s]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL
)


def markdown(lines: Lines) -> str:
    """Columns of numbers to the right."""
    rule = tuple("---:" if right else "---" for right in numbers(lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def filled(page: str, figures: Path = FIGURES) -> str:
    """``page`` with its marked tables made anew."""

    def table(match: re.Match[str]) -> str:
        files = (figures / name.strip() for name in match[3].split(","))
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return match[1] + markdown(TABLES[match[2]](documents)) + match[4]

    return MARKED.sub(table, page)


def main(
    check: Annotated[bool, typer.Option(help="write nothing; fail if a page differs")] = False,
) -> None:
    """Fill the tables of the measured pages."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if check and after != before:
            sys.exit(f"{page.relative_to(ROOT)} is not what its JSON gives: run {sys.argv[0]}")
        if after != before:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
