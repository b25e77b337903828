"""What rounding does to gradients at a pretrained point: SmolLM2-135M, 30 blocks, fp32.

    python benchmarks/boundaries.py --weights folder --tokens 128 --outliers 100

Of checkpointed blocks' inputs, and of layers' forward products by ``forward="int8"``, the backward
and what is stored left exact.
``--outliers``: four columns of the residual stream so many times as large, brought back by norms,
so that the function is the same. Needs what ``fidelity_real.py`` says of SmolLM2.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import torch
import typer
from fidelity_real import pretrained, rows_of
from fidelity_tasks import Setting
from report import show
from torch import Tensor, nn

import hot_compile
from hot_compile.backend import hot
from hot_compile.record import run_uncompiled
from hot_compile.testing import cosine

COLUMNS = [7, 133, 300, 411]
FORWARD = {"recipe": "exact", "forward": "int8", "min_gain": 0, "strict": True}
WRITERS, NORMS = ("o_proj", "down_proj", "embed_tokens"), ("layernorm", "model.norm")


def enlarge(model: nn.Module, factor: float) -> None:
    """Columns of the residual stream ``factor`` times as large; what the model computes stays."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in WRITERS):
                rows = weight if "embed" in name else weight.t()
                rows[:, COLUMNS] *= factor
            elif any(part in name for part in NORMS):
                weight[COLUMNS] /= factor


def gradients(model: nn.Module, ids: Tensor, way: str) -> dict[str, Tensor]:
    """Of all weights; ``way``: "exact", "int8", or in how many bits blocks' inputs are kept."""
    model.zero_grad()
    step = model
    if way == "int8":
        model.gradient_checkpointing_disable()
        backend = functools.partial(hot, options=FORWARD, inner_compile=run_uncompiled)
        step = torch.compile(model, backend=backend)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way.isdigit():
        hot_compile.compress_boundaries(model, bits=int(way))
    step(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def main(
    weights: Annotated[Path | None, typer.Option(help="folder with SmolLM2's GGUF file")] = None,
    tokens: Annotated[int, typer.Option()] = 128,
    rows: Annotated[int, typer.Option(help="of so many tokens each")] = 1,
    device: Annotated[str, typer.Option()] = "cpu",
    outliers: Annotated[float, typer.Option()] = 1.0,
    quick: Annotated[bool, typer.Option(help="two blocks")] = False,
) -> list[tuple[str, ...]]:
    """Print by how much all gradients together are off, their cosine, that of the worst weight."""
    model, tokenizer = pretrained(Setting(Path(), quick=quick, weights=weights))
    ids = rows_of(tokenizer, True, tokens, rows).to(device)
    model.train().to(device)
    if outliers != 1:
        enlarge(model, outliers)
    want = gradients(model, ids, "exact")
    lines: list[tuple[str, ...]] = [("way", "off by, %", "cosine", "worst", "of")]
    for way in ("int8", "6", "8", "12"):
        got = gradients(model, ids, way)
        each = {name: cosine(got[name], want[name]) for name in want if want[name].dim() > 1}
        worst = min(each, key=lambda name: each[name])
        a, b = (torch.cat([g[n].flatten() for n in want]) for g in (got, want))
        off = f"{100 * float((a - b).norm() / b.norm()):.1f}"
        lines.append((way, off, f"{cosine(a, b):.4f}", f"{each[worst]:.4f}", worst))
    show(lines, f"outliers {outliers:g}")
    return lines


if __name__ == "__main__":
    typer.run(main)
