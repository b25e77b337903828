"""What the fidelity suite trains of its own: the examples' small models on real data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Task
from train_char_gpt import char_gpt_task
from train_resnet_digits import two_digits_task
from train_vit_digits import digits_task


@dataclass(frozen=True)
class Setting:
    """Where a task runs, how small, and where its data lie."""

    out: Path
    device: str = "cpu"
    quick: bool = False
    weights: Path | None = None
    """Where pretrained weights and Fashion-MNIST lie; None: where packages put them."""
    images: Path | None = None
    """CIFAR-100's folder, or one with train and val in it, in Fashion-MNIST's place."""
    steps: int = 0
    """0: the task's own."""


TASKS: dict[str, Callable[[Setting], Task]] = {
    "digits": lambda s: digits_task(quick=s.quick, device=s.device),
    "char-gpt": lambda s: char_gpt_task(steps=800, quick=s.quick, device=s.device),
    "two-digits": lambda s: two_digits_task(quick=s.quick, device=s.device),
}
