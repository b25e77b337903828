"""Tables whose cells are shown as they are: a module may be called ``[red]``."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from rich import box
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
