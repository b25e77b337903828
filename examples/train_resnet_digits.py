"""Train a timm ResNet on images with exact Inductor, then with HOT, and compare.

python examples/train_resnet_digits.py                # two-digit numbers
python examples/train_resnet_digits.py --task glyphs  # letters rendered in several fonts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from common import OUT, Device, Out, Quick, Recipe, Run, Seed, Task, accuracy, compare, shuffled
from data import Split, glyphs, two_digits
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

BATCH = 128
EPOCHS = 10
LEARNING_RATE = 2e-3
GLYPH_CLASSES = 40


def resnet(classes: int, width: int) -> nn.Module:
    """A ResNet-10 of 3x3 convolutions on one-channel images, channels last."""
    model = ResNet(
        BasicBlock, [1, 1, 1, 1], num_classes=classes, in_chans=1, stem_type="deep",
        stem_width=width // 2, channels=(width, 2 * width, 4 * width, 8 * width),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def _task(data: Split, classes: int, epochs: int, quick: bool, device: str) -> Task:
    """The ResNet on these images; ``quick`` is only enough to see that every step works."""
    where = torch.device(device)
    steps = 8 if quick else epochs * (len(data.train_x) // BATCH)
    return Task(
        build=lambda: resnet(classes, 16 if quick else 32),
        batches=lambda draw: shuffled(data.train_x, data.train_y, BATCH, draw),
        evaluate=lambda model: accuracy(model, data.held_out_x, data.held_out_y, where),
        metric="accuracy",
        steps=steps,
        learning_rate=LEARNING_RATE,
        device=where,
    )


def two_digits_task(epochs: int = EPOCHS, quick: bool = False, device: str = "cpu") -> Task:
    """Numbers 0 to 99, of digits nobody saw in training."""
    return _task(two_digits(pairs=1024 if quick else 6000), 100, epochs, quick, device)


def glyphs_task(epochs: int = EPOCHS, quick: bool = False, device: str = "cpu") -> Task:
    """Letters of three alphabets, each turned, scaled, shifted and noised."""
    data = glyphs(GLYPH_CLASSES, per_class=20 if quick else 80)
    return _task(data, GLYPH_CLASSES, epochs, quick, device)


TASKS: dict[str, Callable[..., Task]] = {"two-digits": two_digits_task, "glyphs": glyphs_task}


def main(
    recipe: Recipe = "hot",
    seed: Seed = 0,
    task: Annotated[str, typer.Option(help=", ".join(TASKS))] = "two-digits",
    epochs: Annotated[int, typer.Option(help="passes over the images")] = EPOCHS,
    out: Out = OUT,
    device: Device = "cpu",
    quick: Quick = False,
) -> list[Run]:
    """Train with exact Inductor, then with HOT: same seed, same weights, same batches."""
    if task not in TASKS:
        raise typer.BadParameter(f"got {task!r}; expected one of {', '.join(TASKS)}")
    work = TASKS[task](epochs, quick, device)
    name = "resnet_digits" if task == "two-digits" else f"resnet_{task}"
    return compare(work, recipe, seed, out / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
