"""``hot-compile plan``: layers, bytes and the largest batch on a device that is not here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: hot-compile plan --model timm:vit_base_patch16_224 --batch 256 --device h200"
_MODEL = (
    "timm:NAME, or MODULE:FUNCTION (also of a file in this folder), a function of the batch that"
    " returns (model, inputs)"
)
_DEVICES = (
    "h200, h100, a100, a10, rtx3090, l4, l40s, rtx4090, cpu, or a file that hot-compile tune made"
)


def plan(
    model: Annotated[str, typer.Option(help=_MODEL)],
    batch: Annotated[int, typer.Option(min=1, help="samples in a step")],
    device: Annotated[str, typer.Option(help=_DEVICES)],
    dtype: Annotated[str, typer.Option(help="fp32, tf32, or by autocast bf16, fp16")] = "fp32",
    recipe: Annotated[str, typer.Option(help="as for torch.compile's option")] = "hot",
    optimizer: Annotated[str, typer.Option(help="adamw, momentum or sgd")] = "adamw",
    memory: Annotated[
        str | None, typer.Option(help="e.g. 24GiB: which batch is the largest that fits?")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="e.g. 16GiB: keep the step's peak below, as peak_budget")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write the page of it, too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Predict what would be done to a model, and what a step would hold. Nothing runs."""
    sys.path.insert(0, str(Path.cwd()))  # as Python does for a script or `python -m`
    from .plan_output import show  # Inductor: seconds that no other command should wait for

    show(model, batch, device, dtype, recipe, optimizer, memory, budget, html, as_json)
