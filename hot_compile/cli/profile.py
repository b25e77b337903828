"""``hot-compile profile``: read a profile, and say what changed between two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hot_compile.errors import ProfileFormatError
from hot_compile.passes.profile.profile import SIDES, LayerProfile, Profile
from hot_compile.tables import PlainTable

app = typer.Typer(
    help="Profiles made by hot_compile.calibrate, and what looks found.", no_args_is_help=True
)


AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


@app.command(epilog="Example: hot-compile profile show profile.json --layer blocks.0.fc1")
def show(
    path: Annotated[Path, typer.Argument(help="a profile")],
    layer: Annotated[str | None, typer.Option(help="one layer in full")] = None,
    as_json: AsJson = False,
) -> None:
    """Errors of every strategy and outliers of every operand, layer by layer."""
    profile = _load(path)
    if layer is not None and layer not in profile.layers:
        raise typer.BadParameter(f"got {layer!r}; the profile has {', '.join(profile.layers)}")
    if as_json:
        shown = profile.layers if layer is None else {layer: profile.layers[layer]}
        print(json.dumps({name: dict(_figures(one)) for name, one in shown.items()}, indent=1))
        return
    console = _console()
    facts = ", ".join(f"{key} {value}" for key, value in profile.environment.items())
    console.print(f"{path}: {len(profile.layers)} layers, HLA rank {profile.rank}; {facts}")
    if layer is not None:
        console.print(_layer_table(layer, profile.layers[layer]))
    else:
        console.print(*_errors_tables(profile), *_outliers_tables(profile))


@app.command(epilog="Example: hot-compile profile diff monday.json friday.json --threshold 2")
def diff(
    before: Annotated[Path, typer.Argument(help="a profile")],
    after: Annotated[Path, typer.Argument(help="another one")],
    threshold: Annotated[
        float, typer.Option(min=1, help="show figures that changed by this factor")
    ] = 1.1,
    as_json: AsJson = False,
) -> None:
    """Layers that only one of two profiles has, and figures that differ. Exit code 1 if any."""
    old, new = _load(before), _load(after)
    rows: list[tuple[str, ...]] = []
    table = _table(f"{before} to {after}", "layer", "figure", "before", "after", "change")
    for name in sorted({*old.layers, *new.layers}):
        for row in _changes(old.layers.get(name), new.layers.get(name), threshold):
            rows.append((name, *row))
            table.add(name, *row)
    if as_json:
        print(json.dumps(rows, indent=1))
        raise typer.Exit(bool(rows))
    console = _console()
    if not table.row_count:
        console.print(f"no figure differs by a factor of {threshold:g} or more")
        return
    console.print(table)
    raise typer.Exit(1)


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


def _load(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except ProfileFormatError as error:
        raise typer.BadParameter(str(error)) from None


def _console() -> Console:
    """Text as it is: names and paths are no markup."""
    return Console(width=None if Console().is_terminal else 140, markup=False)


def _table(title: str, *columns: str) -> PlainTable:
    return PlainTable(title, *columns, right=set(columns[1:]))


def _variants(profile: Profile, side: str) -> list[str]:
    return sorted({name for layer in profile.layers.values() for name in getattr(layer, side)})


def _errors_tables(profile: Profile) -> Iterator[PlainTable]:
    """Relative errors: of g_x by width and granule, of g_w and of y by strategy."""
    titles = {
        "grad_input": "relative error of g_x",
        "grad_weight": "relative error of g_w",
        "forward": "relative error of y by an 8-bit forward",
    }
    for side in SIDES:
        if not (variants := _variants(profile, side)):
            continue
        table = _table(titles[side], "layer", "L x O x I", *variants)
        for name, layer in profile.layers.items():
            errors = (getattr(layer, side).get(variant) for variant in variants)
            shape = f"{layer.rows} x {layer.outputs} x {layer.inputs}"
            table.add(name, shape, *("" if m is None else f"{m.error:.3g}" for m in errors))
        yield table


def _outliers_tables(profile: Profile) -> Iterator[PlainTable]:
    """Per operand: peaks of rows and columns, kurtosis; g_y's per-token and per-tensor error."""
    columns = "row peak", "col peak", "kurtosis", "HLA keeps"
    for operand, letter in (("x", "x"), ("weight", "W"), ("grad_output", "g_y")):
        more = ("per token", "per tensor") if operand == "grad_output" else ()
        table = _table(f"outliers of {letter}", "layer", *columns, *more)
        for name, layer in profile.layers.items():
            s = layer.stats.get(operand)
            figures = (s.row_peak, s.column_peak, s.kurtosis, s.hla_energy) if s else (None,) * 4
            errors = (layer.token_error, layer.tensor_error) if more else ()
            table.add(name, *("" if f is None else f"{f:.3g}" for f in (*figures, *errors)))
        yield table


def _layer_table(name: str, layer: LayerProfile) -> PlainTable:
    table = _table(name, "figure", "value")
    for key, value in _figures(layer):
        table.add(key, str(value))
    return table


def _figures(layer: LayerProfile | None) -> Iterator[tuple[str, Any]]:
    """Every figure of a layer with its path, e.g. ``grad_weight int8 error``."""
    if layer is None:
        return
    for key in ("outputs", "inputs", "rows", "dtype", "batches", "token_error", "tensor_error"):
        yield key, getattr(layer, key)
    for side in (*SIDES, "stats"):
        for name, measure in getattr(layer, side).items():
            for key, value in vars(measure).items():
                yield f"{side} {name} {key}", value


def _changes(
    old: LayerProfile | None, new: LayerProfile | None, threshold: float
) -> Iterator[tuple[str, str, str, str]]:
    """(figure, before, after, factor) of what differs."""
    if old is None or new is None:
        shape = new or old
        assert shape is not None
        size = f"{shape.outputs} x {shape.inputs}"
        yield "layer", "" if old is None else size, "" if new is None else size, ""
        return
    before, after = dict(_figures(old)), dict(_figures(new))
    for key in sorted({*before, *after}):
        a, b = before.get(key), after.get(key)
        numbers = isinstance(a, float) and isinstance(b, float) and a > 0 and b > 0
        factor = b / a if numbers else None  # type: ignore[operator]
        if a == b or (factor is not None and 1 / threshold < factor < threshold):
            continue
        yield key, str(a), str(b), "" if factor is None else f"{factor:.2f}x"
