"""What takes longer than five seconds says on a terminal what it does."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.errors import LiveError
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
_STDERR = Console(stderr=True)
"""One for all: of two that are under way at a time it can show both, or the outer one."""


@contextlib.contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called at the beginning of each of ``total`` steps, with its name.

    Shown on stderr while it lasts, if that is a terminal.
    """
    console = console or _STDERR
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn()
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    bar = Progress(*columns, *times, console=console, transient=True)
    row, begun = bar.add_task("", total=total), itertools.count()
    shown = contextlib.ExitStack()

    def show() -> None:
        with contextlib.suppress(LiveError):  # rich below 14.1 shows one at a time
            bar.start()
            shown.callback(bar.stop)

    timer = threading.Timer(_PATIENCE, show)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield lambda what: bar.update(row, description=what, completed=next(begun))
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
        shown.close()
