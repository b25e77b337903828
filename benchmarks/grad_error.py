"""Error of g_x and g_w on real gradients: a form of g_y for each product against one for both.

    python benchmarks/grad_error.py

A small ViT learns noisy pictures of random prototypes; at some steps every Linear's g_y and x are
taken, and both ways' gradients are compared with exact ones, x in 8 bits. A cell is the relative
error of g_x, or of g_w (of q, k and v apart), with a form for each product, with one for both
(ADR 5), and with one for both whose parts are made equal first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import timm
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from hot_compile.config import Strategy
from hot_compile.passes.layers.strategies import STRATEGIES, How

CLASSES = 20
Gradients = tuple[Tensor, Tensor]


def way_of(**how: bool) -> Callable[[Tensor, Tensor, Tensor], Gradients]:
    """Both gradients of one layer from its g_y, x and W."""
    return lambda g, x, w: STRATEGIES[Strategy.INT8](g, x, w, How(**how))[:2]


WAYS = (way_of(), way_of(one_read=True), way_of(one_read=True, fused=True))


def errors(name: str, g: Tensor, x: Tensor, w: Tensor) -> list[str]:
    """One cell for g_x and one for each part of g_w, three ways in each."""
    ways = [way(g, x, w) for way in WAYS]
    exact = (g.double() @ w.double(), g.double().t() @ x.double())
    parts = 3 if name.endswith("qkv") else 1

    def cell(which: int, rows: slice) -> str:
        want = exact[which][rows]
        return " ".join(
            f"{float((way[which][rows] - want).norm() / want.norm()):.3f}" for way in ways
        )

    step = g.shape[1] // parts
    return [
        cell(0, slice(None)),
        *(cell(1, slice(p * step, (p + 1) * step)) for p in range(parts)),
    ]


def main(
    steps: Annotated[str, typer.Option(help="at which gradients are taken")] = "1,60",
    batch: Annotated[int, typer.Option(help="pictures a step")] = 32,
) -> int:
    """Train, print a table for each of ``steps``; returns how many layers were measured."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=112, depth=4, num_classes=CLASSES)
    taken: dict[str, list[Tensor]] = {}

    def watch(name: str, layer: nn.Linear) -> None:
        def forward(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            taken[name] = [inputs[0].detach().flatten(0, -2)]
            output.register_hook(lambda g: taken[name].append(g.detach().flatten(0, -2)))

        layer.register_forward_hook(forward)

    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n}
    for name, layer in layers.items():
        watch(name, layer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    prototypes, wanted = torch.randn(CLASSES, 3, 112, 112), [int(s) for s in steps.split(",")]
    for step in range(max(wanted) + 1):
        y = torch.randint(CLASSES, (batch,))
        loss = F.cross_entropy(model(prototypes[y] * 0.3 + torch.randn(batch, 3, 112, 112)), y)
        optimizer.zero_grad()
        loss.backward()
        if step in wanted:
            table = Table("layer", "g_x", "g_w (q)", "k", "v", title=f"step {step}")
            for name, (x, g) in taken.items():
                table.add_row(name, *errors(name, g, x, layers[name].weight.detach()))
            Console(width=120).print(table)
        optimizer.step()
    return len(layers)


if __name__ == "__main__":
    typer.run(main)
