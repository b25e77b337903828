"""What rounding checkpointed blocks' inputs does to gradients: SmolLM2-135M, 30 blocks, fp32.

    python benchmarks/boundaries.py --weights folder --tokens 128 --outliers 100

``--outliers``: four columns of the residual stream so many times as large, brought back by norms,
so that the function is the same. Needs what ``fidelity_real.py`` says of SmolLM2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from fidelity_real import pretrained, rows_of
from fidelity_tasks import Setting
from report import show
from torch import Tensor, nn

import hot_compile
from hot_compile.testing import cosine

COLUMNS = [7, 133, 300, 411]
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


def gradients(model: nn.Module, ids: Tensor, bits: int) -> dict[str, Tensor]:
    """Of all weights, blocks' inputs kept in so many bits; 0: as they are."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    if bits:
        hot_compile.compress_boundaries(model, bits=bits)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def main(
    weights: Annotated[Path | None, typer.Option(help="folder with SmolLM2's GGUF file")] = None,
    tokens: Annotated[int, typer.Option()] = 128,
    outliers: Annotated[float, typer.Option()] = 1.0,
    quick: Annotated[bool, typer.Option(help="two blocks")] = False,
) -> list[tuple[str, ...]]:
    """Print the cosine of all gradients together, of the worst weight, and which that is."""
    model, tokenizer = pretrained(Setting(Path(), quick=quick, weights=weights))
    ids = rows_of(tokenizer, True, tokens, 1)
    model.train()
    if outliers != 1:
        enlarge(model, outliers)
    want = gradients(model, ids, 0)
    lines: list[tuple[str, ...]] = [("bits", "all", "worst", "of")]
    for bits in (6, 8, 12):
        got = gradients(model, ids, bits)
        each = {name: cosine(got[name], want[name]) for name in want if want[name].dim() > 1}
        worst = min(each, key=lambda name: each[name])
        both = (torch.cat([g[n].flatten() for n in want]) for g in (got, want))
        lines.append((f"{bits}", f"{cosine(*both):.4f}", f"{each[worst]:.4f}", worst))
    show(lines, f"outliers {outliers:g}")
    return lines


if __name__ == "__main__":
    typer.run(main)
