"""``hot-compile profile``: what looks at earlier runs found."""

from __future__ import annotations

import typer

app = typer.Typer(help="What looks at earlier runs found.", no_args_is_help=True)


@app.callback()
def profile() -> None:
    """What looks at earlier runs found."""


@app.command(epilog="Example: hot-compile profile forget")
def forget() -> None:
    """Forget what looks at earlier runs found: the next run starts anew (docs/acceptance.md)."""
    from hot_compile.observing.acceptance import (
        folder,  # with torch, which other commands need not wait for
    )

    files = list(folder().glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    print(f"forgot the findings of {len(files)} graphs in {folder()}")
