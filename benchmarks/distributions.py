"""Errors of every quantiser on gradients and activations that are not Gaussian.

    python benchmarks/distributions.py --json distributions.json

A row is a distribution; a cell is the error relative to the exact result's norm. g_x and g_w of a
layer [rows, outputs] x 256 inputs, x in INT8: with one quantisation of g_y for both products (what
a Hopper GPU takes), with one for each (a CPU), and in 4 bits (recipe `paper`: scales a tensor).
A 3 x 3 convolution of as many outputs on 16 x 16 pixels likewise. Then a tensor of that
distribution as an activation: y of an INT8 forward, transformed along the inputs and as it comes,
and what storage makes of it, INT8 by column and tile.
On a GPU its kernels compute, elsewhere the definitions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tables
import torch
import typer
from convs import Conv, exact, int8, operands
from report import document, publish
from torch import Tensor

from hot_compile.config import Strategy
from hot_compile.distributions import DISTRIBUTIONS
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.runtime.native import build
from hot_compile.runtime.reference.sizes import UNITS_PER_TILE

hot = torch.ops.hot
WAYS = {
    "one read": How(one_read=True),
    "two reads": How(),
    "per tensor, 4 bits": How(gx_bits=4, per_row=False, per_channel=False),
}
FLOATS = ("grad_output", "x", "weight")
FORWARDS = {"forward": Form(), "forward, not transformed": Form(rotated=False)}


def _columns(q: Tensor, scale: Tensor, rows: int) -> Tensor:
    tile = 16 * UNITS_PER_TILE
    steps = scale.float().repeat_interleave(tile, 1)[:, : q.shape[1]]
    return (q.float() * steps).t()[:rows]


STORED = {
    "x in INT8": lambda x: _columns(*hot.compress_int8(x, 0, 1), len(x)),
}


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _convolution(g: Tensor) -> list[float]:
    """Errors of g_x and g_w of a convolution whose positions have ``g``'s rows."""
    side, outputs = 16, g.shape[1]
    layer = Conv("3 x 3", side, 64, outputs, 3)
    drawn = operands(layer, len(g) // side**2, torch.float32, g.device)
    grad = g.reshape(-1, side, side, outputs).permute(0, 3, 1, 2)
    t = dataclasses.replace(drawn, grad_output=grad, x=drawn.x + 1)
    double = [tensor.double() for tensor in (t.grad_output, t.x, t.weight)]
    want = exact(dataclasses.replace(t, **dict(zip(FLOATS, double, strict=True))))
    return [_error(a, b.permute(0, 2, 3, 1)) for a, b in zip(int8(t), want, strict=True)]


def row(name: str, rows: int, outputs: int, device: str) -> dict[str, Any]:
    """Errors on one distribution."""
    g = DISTRIBUTIONS[name](rows, outputs).to(device)
    x, w = torch.randn(rows, 256, device=device) + 1, torch.randn(outputs, 256, device=device)
    exact = g.double() @ w.double(), g.double().t() @ x.double()
    found: dict[str, Any] = {"distribution": name, "outputs": outputs}
    for way, how in WAYS.items():
        got = STRATEGIES[Strategy.INT8](g, x, w, how)[:2]
        found[way] = [_error(*pair) for pair in zip(got, exact, strict=True)]
    found["convolution"] = _convolution(g)
    for name_of, form in FORWARDS.items():
        y = int8_product(g, w.t().contiguous(), None, None, form, torch.float32)
        found[name_of] = _error(y, g.double() @ w.double())
    for scheme, restored in STORED.items():
        found[scheme] = _error(restored(g), g.double())
    return found


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rows: Annotated[int, typer.Option(help="rows of grad_output")] = 4096,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> None:
    """Measure, print a table, and write JSON on request."""
    build.load(device)
    torch.manual_seed(0)
    found = [row(name, rows, n, device) for name in DISTRIBUTIONS for n in (1024, 8192)]
    facts = document(torch.device(device), {"rows": rows}, found)
    publish(tables.distributions, facts, "errors of quantisers", json_file)


if __name__ == "__main__":
    typer.run(main)
