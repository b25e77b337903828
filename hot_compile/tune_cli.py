"""``hot-compile tune``: what this machine's devices sustain, measured, beside the table's rates."""

from __future__ import annotations

from typing import Annotated

import typer


def tune(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; by default every device found")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="only show what was measured")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="forget what was measured")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="with --show: print JSON instead of a table")
    ] = False,
) -> None:
    """Measure in seconds what this machine's devices sustain, for the planner; show and keep it.

    Nothing else measures: without this command graphs are planned by a built-in table. Run it while
    nothing else runs. Graphs are planned anew by what was found.
    """
    from . import tune_output  # with the cost model, which other commands need not wait for

    if show and reset:
        raise typer.BadParameter("got both --show and --reset; expected one of them, or neither.")
    if as_json and not show:
        raise typer.BadParameter("got --json without --show; expected both: measure, then show.")
    found = tune_output.devices(device)
    if as_json:
        tune_output.show_json(found)
        return
    action = tune_output.show if show else tune_output.reset if reset else tune_output.measure
    for one in found:
        action(one)
