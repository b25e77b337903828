"""Train a timm ViT on handwritten digits with exact Inductor, then with HOT, and compare."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import OUT, Device, Out, Quick, Recipe, Run, Seed, Task, accuracy, compare, shuffled
from data import digits, shifted
from timm.models.vision_transformer import VisionTransformer
from torch import nn

BATCH = 128
EPOCHS = 20
LEARNING_RATE = 1e-3
SHIFT = 1
"""Images move by up to one of their 32 pixels per batch; more is too hard in so few epochs."""


def vit(width: int, depth: int) -> nn.Module:
    """A ViT of 16 tokens, each 2x2 of the 8x8 pixels that the digits were recorded with."""
    return VisionTransformer(
        img_size=32, patch_size=8, in_chans=1, num_classes=10,
        embed_dim=width, depth=depth, num_heads=width // 64, class_token=False, global_pool="avg",
    )  # fmt: skip


def digits_task(epochs: int = EPOCHS, quick: bool = False, device: str = "cpu") -> Task:
    """The ViT on the digits; ``quick`` is only enough to see that every step of it works."""
    data, where = digits(), torch.device(device)
    width, depth = (64, 1) if quick else (256, 3)
    steps = 8 if quick else epochs * (len(data.train_x) // BATCH)
    return Task(
        build=lambda: vit(width, depth),
        batches=lambda draw: (
            (shifted(x, SHIFT, draw), y)
            for x, y in shuffled(data.train_x, data.train_y, BATCH, draw)
        ),
        evaluate=lambda model: accuracy(model, data.held_out_x, data.held_out_y, where),
        metric="accuracy",
        steps=steps,
        learning_rate=LEARNING_RATE,
        device=where,
    )


def main(
    recipe: Recipe = "hot",
    seed: Seed = 0,
    epochs: Annotated[int, typer.Option(help="passes over the 1347 training digits")] = EPOCHS,
    out: Out = OUT,
    device: Device = "cpu",
    quick: Quick = False,
) -> list[Run]:
    """Train with exact Inductor, then with HOT: same seed, same weights, same batches."""
    return compare(digits_task(epochs, quick, device), recipe, seed, out / "vit_digits.png")


if __name__ == "__main__":
    typer.run(main)
