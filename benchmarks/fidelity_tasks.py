"""What the fidelity suite trains: small models on real or rendered data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Batches, Task, Variant, accuracy, shuffled, train_variants
from data import Split, glyphs
from train_char_gpt import char_gpt_task
from train_resnet_digits import resnet, two_digits_task
from train_vit_digits import digits_task

KNOWN, UNSEEN = 60, 40
"""Glyph classes for training from scratch, and those after them for fine-tuning."""
LORA_RANK = 16
_TARGETS = r".*blocks.*\.(qkv|proj|fc1|fc2)"


@dataclass(frozen=True)
class Setting:
    """Where a task runs, how small, and where what it pretrains is kept."""

    out: Path
    device: str = "cpu"
    quick: bool = False
    weights: Path | None = None
    """Where pretrained weights and Fashion-MNIST lie; None: where packages put them."""
    images: Path | None = None
    """CIFAR-100's folder, or one with train and val in it, in Fashion-MNIST's place."""
    steps: int = 0
    """0: the task's own."""


def glyph_vit(classes: int, quick: bool) -> nn.Module:
    """A ViT of 16 tokens, 192 wide and 4 deep, without class token."""
    from timm.models.vision_transformer import VisionTransformer

    width, depth = (64, 1) if quick else (192, 4)
    return VisionTransformer(
        img_size=32, patch_size=8, in_chans=1, num_classes=classes, embed_dim=width,
        depth=depth, num_heads=width // 64, class_token=False, global_pool="avg",
    )  # fmt: skip


def _glyph_task(
    data: Split, build: Callable[[], nn.Module], steps: int, rate: float, setting: Setting
) -> Task:
    where = torch.device(setting.device)
    held_x, held_y = data.held_out_x, data.held_out_y
    return Task(
        build=build,
        batches=lambda draw: _batches(data, draw),
        evaluate=lambda model: accuracy(model, held_x, held_y, where),
        metric="accuracy",
        steps=8 if setting.quick else steps,
        learning_rate=rate,
        device=where,
    )


def _batches(data: Split, draw: torch.Generator) -> Batches:
    return shuffled(data.train_x, data.train_y, 128, draw)


def glyph_scratch(setting: Setting) -> Task:
    """60 classes of rendered letters, from random weights."""
    data = _known(setting)
    return _glyph_task(data, lambda: glyph_vit(KNOWN, setting.quick), 800, 1e-3, setting)


def glyph_resnet(setting: Setting) -> Task:
    """The same letters, a ResNet of 3 x 3 convolutions from random weights."""
    data = _known(setting)
    return _glyph_task(data, lambda: resnet(KNOWN, 16 if setting.quick else 32), 400, 2e-3, setting)


def glyph_tune(setting: Setting) -> Task:
    """40 classes never seen before, all weights trained from those of ``glyph_scratch``."""
    data = _unseen(setting)
    return _glyph_task(data, lambda: _pretrained(setting), 300, 2.5e-4, setting)


def glyph_lora(setting: Setting) -> Task:
    """The same with every block's weights frozen and low-rank factors beside them (peft)."""
    from peft import LoraConfig, get_peft_model

    def build() -> nn.Module:
        config = LoraConfig(
            r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules=_TARGETS,
            modules_to_save=["head"],
        )  # fmt: skip
        return get_peft_model(_pretrained(setting), config)

    return _glyph_task(_unseen(setting), build, 300, 2e-3, setting)


@cache
def _known(setting: Setting) -> Split:
    return glyphs(KNOWN, per_class=8 if setting.quick else 160, held_out=0.25)


@cache
def _unseen(setting: Setting) -> Split:
    per_class = 10 if setting.quick else 100
    return glyphs(UNSEEN, per_class=per_class, held_out=0.5, first=KNOWN)


def _pretrained(setting: Setting) -> nn.Module:
    """A ViT with the weights of ``pretrain`` and a fresh head."""
    state = torch.load(_weights(setting), weights_only=True)
    model = glyph_vit(UNSEEN, setting.quick)
    fresh = {f"head.{name}": value for name, value in model.head.state_dict().items()}
    model.load_state_dict({**state, **fresh})
    return model


def _weights(setting: Setting) -> Path:
    return setting.out / ("pretrained.quick.pt" if setting.quick else "pretrained.pt")


def pretrain(setting: Setting) -> None:
    """Weights for fine-tuning: exact training of ``glyph_scratch`` from seed 1000, once.

    Of several processes that need them, one trains and the others wait.
    """
    path = _weights(setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _train_weights(setting, path)


def _train_weights(setting: Setting, path: Path) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    task = glyph_scratch(setting)

    def evaluate(model: nn.Module) -> float:
        kept.append({name: value.cpu() for name, value in model.state_dict().items()})
        return task.evaluate(model)

    keeping = replace(task, evaluate=evaluate)
    train_variants(keeping, [Variant("exact", "aot_eager")], 1000, Console(stderr=True))
    torch.save(kept[0], path)


TASKS: dict[str, Callable[[Setting], Task]] = {
    "digits": lambda s: digits_task(quick=s.quick, device=s.device),
    "glyph-scratch": glyph_scratch,
    "glyph-tune": glyph_tune,
    "char-gpt": lambda s: char_gpt_task(steps=800, quick=s.quick, device=s.device),
    "lora": glyph_lora,
    "two-digits": lambda s: two_digits_task(quick=s.quick, device=s.device),
    "glyph-resnet": glyph_resnet,
}
NEEDS_PRETRAINING = {"glyph-tune", "lora"}
