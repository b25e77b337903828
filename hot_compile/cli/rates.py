"""What ``hot-compile tune`` measures, shows and forgets."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import typer
from rich.console import Console
from rich.text import Text

from hot_compile.errors import BuildError
from hot_compile.passes.cost import tuned
from hot_compile.passes.cost.devices import table_entry, tune
from hot_compile.passes.cost.linear import Rates
from hot_compile.progress import progress
from hot_compile.runtime.native.providers import status
from hot_compile.tables import PlainTable

_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))
_BYTES = {
    **{"transform": "quantise, transform", "packing": "pack, restore", "copy": "copy"},
    "host_copy": "copy to the host",
}
_CALLS = {"launch": "a call of the host's", "start": "a kernel's start"}


def devices(asked: str | None) -> list[torch.device]:
    """One of every kind here, or the one that was asked for.

    Raises:
        typer.BadParameter: that is not here.
    """
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    found = [torch.device("cpu"), *gpus]
    if asked is None:
        return list({tuned.kind_of(one): one for one in reversed(found)}.values())[::-1]
    wanted = "cuda:0" if asked == "cuda" else asked
    for one in found:
        if str(one) == wanted:
            return [one]
    valid = ", ".join(map(str, found))
    raise typer.BadParameter(f"got device {asked!r}; expected one that is here: {valid}.")


def measure(device: torch.device) -> None:
    """Measure ``device``, show what was found beside the table's rates, keep it.

    Raises:
        typer.Exit: it could not be measured; the reason is printed.
    """
    console = Console(highlight=False)
    try:
        with progress(1) as begin:
            begin(f"measuring {device}, some seconds")
            rates = tune(device)
    except (BuildError, OSError, RuntimeError) as error:
        console.print(Text(f"{device}: {error}", style="red"))
        raise typer.Exit(1) from None
    console.print(_table(device, rates))
    console.print(Text(f"kept in {tuned.path_of(device)}"), soft_wrap=True)


def show(device: torch.device) -> None:
    """Show what was measured, if anything was, beside the table's rates."""
    console = Console(highlight=False)
    console.print(_table(device, tuned.load(device)))
    path = tuned.path_of(device)
    said = f"kept in {path}" if path.exists() else "never measured: the table's rates count"
    console.print(Text(said), soft_wrap=True)


def show_json(found: Sequence[torch.device]) -> None:
    """Print the same of all these devices, in operations, bytes and seconds."""
    data = {}
    for device in found:
        entry, rates, path = table_entry(device), tuned.load(device), tuned.path_of(device)
        data[str(device)] = {
            "kind": tuned.kind_of(device),
            "measured": None if rates is None else _named(rates),
            "table": None if isinstance(entry, str) else _named(entry),
            "kept_in": str(path) if path.exists() else None,
        }
    print(json.dumps(data, indent=1))


def reset(device: torch.device) -> None:
    """Forget what was measured, layouts of images included."""
    rates, layouts = tuned.path_of(device), tuned.path_of(device, "-images-*")
    kept = [rates] * rates.exists() + sorted(layouts.parent.glob(layouts.name))
    for path in kept:
        path.unlink(missing_ok=True)
    said = [f"removed {path}" for path in kept] or ["nothing was kept"]
    for text in said:
        Console(highlight=False).print(Text(f"{device}: {text}"), soft_wrap=True)


def _table(device: torch.device, rates: Rates | None) -> PlainTable:
    """What was measured of ``device`` beside the table's rates of its kind."""
    provider, entry = status(device.type), table_entry(device)
    problem = entry if isinstance(entry, str) else "" if provider.available else provider.reason
    title = f"{device}: {tuned.kind_of(device)}" + (f" ({problem})" if problem else "")
    numbers = ("measured", "table", "ratio")
    table = PlainTable(title, "what", *numbers, right=set(numbers))
    ours = {} if rates is None else _named(rates)
    theirs = {} if isinstance(entry, str) else _named(entry)
    for name in dict.fromkeys([*theirs, *ours]):
        mine, other = ours.get(name), theirs.get(name)
        ratio = f"{mine / other:.2f}" if mine and other else ""
        table.add(name, _text(name, mine), _text(name, other), ratio)
    return table


def _named(rates: Rates) -> dict[str, float]:
    """What is shown, by what it is called; without what no device has."""
    named = {f"products, {dtype}": rate for dtype, rate in rates.exact.items()}
    named |= {f"convolutions, {dtype}": rate for dtype, rate in rates.convolution.items()}
    named |= {"products, INT8": rates.integer, "products, INT4": rates.int4}
    named |= {name: getattr(rates, field) for field, name in {**_BYTES, **_CALLS}.items()}
    return {name: value for name, value in named.items() if value}


def _text(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in _CALLS.values():
        return f"{value * 1e6:.1f} us"
    letter, unit = next(((u, n) for u, n in _UNITS if value >= n), _UNITS[-1])
    per = "B/s" if name in _BYTES.values() else "op/s"
    return f"{value / unit:.3g} {letter}{per}"
