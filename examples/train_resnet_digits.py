"""Train a timm ResNet on two-digit numbers with exact Inductor, then with HOT, and compare."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import OUT, Device, Out, Quick, Recipe, Run, Seed, Task, accuracy, compare, shuffled
from data import two_digits
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

BATCH = 128
EPOCHS = 10
LEARNING_RATE = 2e-3


def resnet(width: int) -> nn.Module:
    """A ResNet-10 of 3x3 convolutions on one-channel images, channels last."""
    model = ResNet(
        BasicBlock, [1, 1, 1, 1], num_classes=100, in_chans=1, stem_type="deep",
        stem_width=width // 2, channels=(width, 2 * width, 4 * width, 8 * width),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def two_digits_task(epochs: int = EPOCHS, quick: bool = False, device: str = "cpu") -> Task:
    """The ResNet on numbers 0 to 99; ``quick`` is only enough to see that every step works."""
    data, where = two_digits(pairs=1024 if quick else 6000), torch.device(device)
    steps = 8 if quick else epochs * (len(data.train_x) // BATCH)
    return Task(
        build=lambda: resnet(16 if quick else 32),
        batches=lambda draw: shuffled(data.train_x, data.train_y, BATCH, draw),
        evaluate=lambda model: accuracy(model, data.held_out_x, data.held_out_y, where),
        metric="accuracy",
        steps=steps,
        learning_rate=LEARNING_RATE,
        device=where,
    )


def main(
    recipe: Recipe = "hot",
    seed: Seed = 0,
    epochs: Annotated[int, typer.Option(help="passes over 6000 numbers")] = EPOCHS,
    out: Out = OUT,
    device: Device = "cpu",
    quick: Quick = False,
) -> list[Run]:
    """Train with exact Inductor, then with HOT: same seed, same weights, same batches."""
    task = two_digits_task(epochs, quick, device)
    return compare(task, recipe, seed, out / "resnet_digits.png")


if __name__ == "__main__":
    typer.run(main)
