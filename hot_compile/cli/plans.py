"""What ``hot-compile plan`` prints: layers, bytes, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hot_compile.errors import OptionError
from hot_compile.inspect import Explanation, megabytes
from hot_compile.page import save_page
from hot_compile.planning import Made, Prediction, largest_batch, maker, predict
from hot_compile.sizes import memory_bytes
from hot_compile.stock import STOCK
from hot_compile.tables import PlainTable

_SIZES = {
    "held from forward to backward": "held",
    "weights and buffers": "weights",
    "gradients": "gradients",
    "optimizer's states": "states",
    "inputs": "inputs",
    "together": "total",
}
"""Of a prediction: what is shown, and its field."""
_NOT_COUNTED = (
    "Not counted: what kernels need while they run, the CUDA context, fragmentation. Where little "
    "is held a true peak is higher: by 13 % for a ViT-B at batch 256 in bf16 on an H200."
)


def show(
    model: str,
    batch: int,
    device: str,
    dtype: str,
    recipe: str,
    optimizer: str,
    memory: str | None,
    budget: str | None,
    html: Path | None,
    as_json: bool = False,
) -> None:
    """Print the prediction, and write its page to ``html``.

    Raises:
        typer.BadParameter: one of the values cannot be.
    """
    try:
        make, options = maker(model), {"recipe": recipe}
        if budget is not None:
            options["peak_budget"] = budget
        limit = memory_bytes(memory) if memory else None
        step = _Step(make, device, dtype, optimizer)
        ours, stock = (functools.cache(step.with_options(o)) for o in (options, STOCK))
        both = ours(batch), stock(batch)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{model}, batch {batch}, {dtype}, on {device}: predicted"
    console = Console(width=140, soft_wrap=True, highlight=False, stderr=as_json)
    largest = [_largest(of, limit, batch) for of in (ours, stock)] if limit is not None else []
    if as_json:
        sizes = [{field: getattr(p, field) for field in _SIZES.values()} for p in both]
        data = {"bytes": dict(zip(("hot", "stock"), sizes, strict=True)), "largest": largest}
        print(json.dumps({**data, **Explanation(both[0].graphs).to_json()}, indent=1, default=str))
    else:
        print(Explanation(both[0].graphs))
        console.print(_table(title, *both))
        console.print(_NOT_COUNTED, markup=False)
        if largest:
            both_ways = f"{largest[0]}; Inductor as it is: {largest[1]}"
            text = f"largest that fits into {memory} so counted: {both_ways}"
            console.print(text, markup=False)
    if html is not None:
        save_page(html, both[0].graphs, title=title, stock={"exact": both[1].graphs})
        console.print(f"wrote {html}", markup=False)


@dataclasses.dataclass(frozen=True)
class _Step:
    make: Callable[[int], Made]
    device: str
    dtype: str
    optimizer: str

    def with_options(self, options: Mapping[str, Any]) -> Callable[[int], Prediction]:
        """What predicts a batch with these options, and says so: it takes a while."""

        def predicted(batch: int) -> Prediction:
            typer.echo(f"tracing batch {batch} with {dict(options)}", err=True)
            return predict(self.make, batch, self.device, self.dtype, self.optimizer, options)

        return predicted


def _largest(of: Callable[[int], Prediction], limit: int, batch: int) -> str:
    found = largest_batch(lambda samples: of(samples).total, limit, batch)
    return f"batch {found}" if found else "not one sample"


def _table(title: str, ours: Prediction, stock: Prediction) -> PlainTable:
    columns = ("hot", "Inductor as it is")
    table = PlainTable(title, "bytes", *columns, right=set(columns))
    for name, field in _SIZES.items():
        table.add(name, *(megabytes(getattr(p, field)) for p in (ours, stock)))
    return table
