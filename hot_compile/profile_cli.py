"""``hot-compile profile``: read a profile, and say what changed between two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .errors import ProfileFormatError
from .passes.measure.profile import SIDES, LayerProfile, Profile
from .tables import PlainTable

app = typer.Typer(help="Profiles made by hot_compile.calibrate.", no_args_is_help=True)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="a profile")],
    layer: Annotated[str | None, typer.Option(help="one layer in full")] = None,
) -> None:
    """Errors of every strategy and outliers of every operand, layer by layer."""
    profile = _load(path)
    if layer is not None and layer not in profile.layers:
        raise typer.BadParameter(f"got {layer!r}; the profile has {', '.join(profile.layers)}")
    console = _console()
    facts = ", ".join(f"{key} {value}" for key, value in profile.environment.items())
    console.print(f"{path}: {len(profile.layers)} layers, HLA rank {profile.rank}; {facts}")
    if layer is not None:
        console.print(_layer_table(layer, profile.layers[layer]))
    else:
        console.print(_errors_table(profile), _outliers_table(profile))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="a profile")],
    after: Annotated[Path, typer.Argument(help="another one")],
    threshold: Annotated[
        float, typer.Option(min=1, help="show figures that changed by this factor")
    ] = 1.1,
) -> None:
    """Layers that only one of two profiles has, and figures that differ. Exit code 1 if any."""
    old, new = _load(before), _load(after)
    table = _table(f"{before} to {after}", "layer", "figure", "before", "after", "change")
    for name in sorted({*old.layers, *new.layers}):
        for row in _changes(old.layers.get(name), new.layers.get(name), threshold):
            table.add(name, *row)
    console = _console()
    if not table.row_count:
        console.print(f"no figure differs by a factor of {threshold:g} or more")
        return
    console.print(table)
    raise typer.Exit(1)


def _load(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except ProfileFormatError as error:
        raise typer.BadParameter(str(error)) from None


def _console() -> Console:
    """Text as it is: names and paths are no markup."""
    return Console(width=None if Console().is_terminal else 160, markup=False)


def _table(title: str, *columns: str) -> PlainTable:
    return PlainTable(title, *columns, right=set(columns[1:]))


def _variants(profile: Profile, side: str) -> list[str]:
    return sorted({name for layer in profile.layers.values() for name in getattr(layer, side)})


def _errors_table(profile: Profile) -> PlainTable:
    """Relative errors: g_x by width and granule, g_w by strategy."""
    columns = [(side, name) for side in SIDES for name in _variants(profile, side)]
    short = {"grad_input": "g_x", "grad_weight": "g_w", "forward": "y"}
    headers = [f"{short[side]} {name}" for side, name in columns]
    title = "relative error of gradients, and of y by an 8-bit forward"
    table = _table(title, "layer", "L x O x I", *headers)
    for name, layer in profile.layers.items():
        measures = [getattr(layer, side).get(variant) for side, variant in columns]
        errors = ["" if m is None else f"{m.error:.3g}" for m in measures]
        table.add(name, f"{layer.rows} x {layer.outputs} x {layer.inputs}", *errors)
    return table


def _outliers_table(profile: Profile) -> PlainTable:
    """Per operand: peaks of rows and columns, kurtosis; g_y's per-token and per-tensor error."""
    operands = ("x", "weight", "grad_output")
    headers = [
        f"{o} {s}" for o in operands for s in ("row peak", "col peak", "kurtosis", "HLA keeps")
    ]
    table = _table("outliers", "layer", *headers, "per token", "per tensor")
    for name, layer in profile.layers.items():
        cells = []
        for operand in operands:
            s = layer.stats.get(operand)
            figures = (s.row_peak, s.column_peak, s.kurtosis, s.hla_energy) if s else (None,) * 4
            cells += ["" if figure is None else f"{figure:.3g}" for figure in figures]
        errors = (layer.token_error, layer.tensor_error)
        table.add(name, *cells, *("" if e is None else f"{e:.3g}" for e in errors))
    return table


def _layer_table(name: str, layer: LayerProfile) -> PlainTable:
    table = _table(name, "figure", "value")
    for key, value in _figures(layer):
        table.add(key, str(value))
    return table


def _figures(layer: LayerProfile | None) -> Iterator[tuple[str, Any]]:
    """Every figure of a layer with its path, e.g. ``grad_weight int4 error``."""
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
