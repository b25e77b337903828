"""Train any timm model on CIFAR-100 or an ImageNet-like folder, a run per row of a paper's table.

python examples/train_images.py cifar100 ~/cifar-100-python --model resnet18 --pretrained
python examples/train_images.py folder ~/imagenet --model resnet50 --table 4 --device cuda

examples/README.md has the commands for each table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import typer
from common import (
    OUT,
    Batches,
    Device,
    Out,
    Quick,
    Run,
    Seed,
    Task,
    Variant,
    plot_losses,
    print_table,
    shuffled,
    train_variants,
)
from data import cifar100, image_folder, shifted
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

QUICK_STEPS, QUICK_BATCH = 8, 4
LORA_RANK = 16
LORA_TARGETS = r".*blocks.*\.(qkv|proj|fc1|fc2)"

_PAPER = {"recipe": "paper"}
_PER_TOKEN = {"recipe": "paper", "per_token": True}
_LOW_RANK = {"*lora_*": "hla8"}
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {"hot": {}},
    "1": {  # what ABC and LQS are worth
        "HOT": {**_PER_TOKEN, "recompute": True},
        "+ ABC": _PER_TOKEN,
        "+ ABC + LQS": {**_PAPER, "lqs": "auto"},
    },
    "2": {f"r={rank}": {**_PER_TOKEN, "rank": rank} for rank in (16, 8, 4, 2, 1)},
    "3": {  # with --lora
        "frozen weights": _PAPER,
        "factors": {**_PAPER, "exclude": ["*.base_layer"], "override": _LOW_RANK},
        "both": {**_PAPER, "override": _LOW_RANK},
    },
    "4": {name: {"recipe": name} for name in ("hot", "paper", "luq", "lbp-wht", "int4-naive")},
}
"""By the paper's table: options of each row, besides an exact one and ``min_gain``."""


def variants(table: str) -> list[Variant]:
    """Exact Inductor, then the table's rows, every layer of which is rewritten."""
    rows = TABLES[table].items()
    hot = [Variant(label, "hot", {"min_gain": 0, **options}) for label, options in rows]
    return [Variant.named("exact"), *hot]


def image_model(name: str, classes: int, pretrained: bool, lora: bool) -> nn.Module:
    """A timm model, its weights frozen but for low-rank factors and the head if ``lora``."""
    model = timm.create_model(name, num_classes=classes, pretrained=pretrained)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    head = [model.pretrained_cfg["classifier"]]
    config = LoraConfig(r=LORA_RANK, target_modules=LORA_TARGETS, modules_to_save=head)
    return get_peft_model(model, config)


def input_size(name: str) -> int:
    """Side of the images that a timm model is made for."""
    return timm.get_pretrained_cfg(name).input_size[-1]


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches, device: torch.device) -> float:
    """Share of right answers."""
    right = seen = 0
    for x, y in batches:
        right += int((model(x.to(device)).argmax(-1) == y.to(device)).sum())
        seen += len(y)
    return right / seen


Data = tuple[int, int, Callable[[torch.Generator], Batches], Callable[[], Batches]]
"""(classes, training images, endless shuffled batches, held-out batches)."""


def cifar_data(folder: Path, size: int, batch: int) -> Data:
    """CIFAR-100 in memory: shifted, flipped, scaled up to ``size`` batch by batch."""
    split = cifar100(folder)

    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)

    def training(draw: torch.Generator) -> Batches:
        for x, y in shuffled(split.train_x, split.train_y, batch, draw):
            flip = torch.rand(len(x), 1, 1, 1, generator=draw) < 0.5
            moved = shifted(x, 4, draw)
            yield resized(torch.where(flip, moved.flip(-1), moved)), y

    def held_out() -> Batches:
        pairs = zip(split.held_out_x.split(batch), split.held_out_y.split(batch), strict=True)
        return ((resized(x), y) for x, y in pairs)

    return int(split.train_y.max()) + 1, len(split.train_x), training, held_out


def folder_data(folder: Path, size: int, batch: int, workers: int) -> Data:
    """``train`` and ``val`` (or ``validation``) of a folder such as ImageNet's, read as needed."""
    train = image_folder(folder / "train", size)
    name = next((n for n in ("val", "validation") if (folder / n).is_dir()), None)
    if name is None:
        raise FileNotFoundError(f"got {folder} without a folder val; expected train and val in it")
    rest = image_folder(folder / name, size, train=False)

    def training(draw: torch.Generator) -> Batches:
        loader = DataLoader(
            train, batch, shuffle=True, drop_last=True, num_workers=workers, generator=draw
        )
        while True:
            yield from map(tuple, loader)

    def held_out() -> Batches:
        return map(tuple, DataLoader(rest, batch, num_workers=workers))

    return len(train.classes), len(train), training, held_out


def main(
    data: Annotated[str, typer.Argument(help="cifar100 or folder")],
    path: Annotated[Path, typer.Argument(help="cifar-100-python, or a folder with train and val")],
    model: Annotated[str, typer.Option(help="name of a timm model")] = "vit_base_patch16_224",
    pretrained: Annotated[bool, typer.Option(help="start from timm's weights")] = False,
    lora: Annotated[bool, typer.Option(help="train low-rank factors only (needs peft)")] = False,
    table: Annotated[str, typer.Option(help=", ".join(TABLES))] = "default",
    epochs: Annotated[int, typer.Option(help="passes over the images")] = 50,
    batch: Annotated[int, typer.Option(help="images per step")] = 128,
    learning_rate: Annotated[float, typer.Option(help="peak, of AdamW")] = 1e-4,
    workers: Annotated[int, typer.Option(help="processes that read a folder's images")] = 4,
    seed: Seed = 0,
    out: Out = OUT,
    device: Device = "cpu",
    quick: Quick = False,
) -> list[Run]:
    """Train once per row of the table: same seed, same weights, same batches."""
    if data not in ("cifar100", "folder"):
        raise typer.BadParameter(f"got {data!r}; expected cifar100 or folder")
    if table not in TABLES:
        raise typer.BadParameter(f"got {table!r}; expected one of {', '.join(TABLES)}")
    if (table == "3") != lora:
        raise typer.BadParameter(f"got table {table!r}, lora={lora}; expected --lora with table 3")
    size, batch = input_size(model), QUICK_BATCH if quick else batch
    read = cifar_data(path, size, batch) if data == "cifar100" else None
    classes, images, training, held_out = read or folder_data(path, size, batch, workers)
    if images < batch:
        raise typer.BadParameter(f"got {images} training images; expected a batch of {batch}")
    where = torch.device(device)
    task = Task(
        build=lambda: image_model(model, classes, pretrained, lora),
        batches=training,
        evaluate=lambda trained: accuracy(trained, held_out(), where),
        metric="accuracy",
        steps=QUICK_STEPS if quick else epochs * (images // batch),
        learning_rate=learning_rate,
        device=where,
    )
    console, picture = Console(), out / f"{data}_{model}_{table}.png"
    runs = train_variants(task, variants(table), seed, console)
    print_table(runs, task, console)
    plot_losses(runs, picture)
    console.print(f"loss curves: {picture}")
    return runs


if __name__ == "__main__":
    typer.run(main)
