"""Tables whose cells are shown as they are: a module may be called ``[red]``."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Set
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A rich table that takes no cell, header or title for markup."""

    def __init__(self, title: str, *columns: str, right: Set[str] = frozenset()) -> None:
        """``right``: the columns of numbers, set to the right."""
        heading = Text(title, style="table.title")
        super().__init__(title=heading, box=box.SIMPLE, title_justify="left")
        for column in columns:
            side: Literal["left", "right"] = "right" if column in right else "left"
            self.add_column(Text(column), justify=side, overflow="fold")

    def add(self, *cells: str) -> None:
        """One row."""
        self.add_row(*map(Text, cells))


_WIDEST, _NARROWEST = 140, 60
_IN_A_NOTEBOOK = '<pre style="overflow-x: auto; line-height: 1.2">{code}</pre>'


def rendered(parts: Iterable[Any]) -> str:
    """Tables and lines as text, as wide as the terminal; 140 columns where there is none."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDEST
    console = Console(width=min(_WIDEST, max(_NARROWEST, columns)), highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(Text(part) if isinstance(part, str) else part)
    return capture.get()


def as_html(parts: Iterable[Any]) -> str:
    """The same for a notebook's cell, in a box that scrolls."""
    console = Console(width=_WIDEST, record=True, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return console.export_html(inline_styles=True, code_format=_IN_A_NOTEBOOK)
