"""What takes longer than five seconds says on a terminal what it does."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PATIENCE = 5.0
"""Seconds before anything is shown."""


@contextlib.contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called at the beginning of each of ``total`` steps, with its name.

    Shown on stderr while it lasts, if that is a terminal.
    """
    console = console or Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    bar = Progress(*columns, *times, console=console, transient=True)
    row, begun = bar.add_task("", total=total), itertools.count()
    timer = threading.Timer(_PATIENCE, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield lambda what: bar.update(row, description=what, completed=next(begun))
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
        bar.stop()
