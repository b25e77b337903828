"""Real data that needs no download, and loaders for CIFAR-100 and ImageNet folders you have."""

from __future__ import annotations

import io
import pickle
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

SPLIT_SEED = 0
"""Which samples are held out never depends on the training seed."""


@dataclass(frozen=True)
class Split:
    """Training and held-out samples, kept in memory."""

    train_x: Tensor
    train_y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor


def _split(x: Tensor, y: Tensor, held_out: float) -> Split:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    cut = int(len(x) * (1 - held_out))
    train, rest = order[:cut], order[cut:]
    return Split(x[train], y[train], x[rest], y[rest])


def digits(size: int = 32, held_out: float = 1 / 4) -> Split:
    """scikit-learn's 1797 handwritten digits, scaled up from 8x8 to one channel of size x size."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float().unsqueeze(1)
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    x = (x - x.mean()) / x.std()
    return _split(x, torch.from_numpy(raw.target).long(), held_out)


def two_digits(pairs: int = 6000, size: int = 32, held_out: float = 1 / 4) -> Split:
    """Numbers 0 to 99 as two of scikit-learn's digits side by side, size x 2 size.

    Held-out numbers are made of held-out digits only: nobody saw these strokes in training.
    """
    single, draw = digits(size, held_out), torch.Generator().manual_seed(SPLIT_SEED)
    sides = ((single.train_x, single.train_y), (single.held_out_x, single.held_out_y))
    parts = []
    for (x, y), count in zip(sides, (pairs, int(pairs * held_out)), strict=True):
        left, right = torch.randint(len(x), (2, count), generator=draw)
        parts += [torch.cat((x[left], x[right]), dim=-1), 10 * y[left] + y[right]]
    return Split(*parts)


def shifted(x: Tensor, limit: int, draw: torch.Generator) -> Tensor:
    """Each image moved by up to ``limit`` pixels both ways: the usual crop of a padded image."""
    size = x.shape[-1]
    padded = F.pad(x, (limit,) * 4, mode="replicate")
    dy, dx = torch.randint(2 * limit + 1, (2, len(x), 1), generator=draw) + torch.arange(size)
    sample = torch.arange(len(x))[:, None, None]
    moved = padded[sample, :, dy[:, :, None], dx[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary of ``python_source``: tabs become spaces, anything else is dropped."""


def python_source(limit: int = 4_000_000, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """Character ids of the standard library's own source: (training text, held-out text).

    Whole files are held out, so that the model cannot have seen the other half of a function.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    random.Random(SPLIT_SEED).shuffle(files)
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files)
    unseen = _take(texts, int(limit * held_out))
    train = _take(texts, limit - len(unseen))
    if len(train) < len(unseen):
        raise FileNotFoundError(
            f"got {len(train)} characters of standard library source in {folder}; expected about "
            f"{limit}. Run this with an ordinary Python installation."
        )
    return train, unseen


def _take(texts: Iterator[str], count: int) -> Tensor:
    parts: list[str] = []
    while sum(map(len, parts)) < count and (text := next(texts, None)) is not None:
        parts.append(text)
    return _encode("".join(parts))[:count]


def _encode(text: str) -> Tensor:
    table = {c: i for i, c in enumerate(CHARACTERS)}
    ids = [table[c] for c in text.replace("\t", "    ") if c in table]
    return torch.tensor(ids, dtype=torch.uint8)


GLYPHS = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπρστφχψωБДЖЗИЛЦЧШЩЪЫЭЮЯбджзилцчшщъыэюя"
)
"""Classes of ``glyphs``, in order; letters that look alike across alphabets are left out."""


def glyphs(
    classes: int = 100, per_class: int = 60, size: int = 32, held_out: float = 0.2, first: int = 0
) -> Split:
    """Letters in matplotlib's DejaVu fonts, turned, scaled, shifted and noised, one channel."""
    if first + classes > len(GLYPHS):
        raise ValueError(
            f"got first={first}, classes={classes}; expected at most {len(GLYPHS)} classes in all"
        )
    fonts = _fonts(size)
    draw = torch.Generator().manual_seed(SPLIT_SEED)
    chosen = GLYPHS[first : first + classes]
    clean = torch.stack([_render(c, font, size) for c in chosen for font in fonts])
    y = torch.arange(classes).repeat_interleave(per_class)
    font = torch.randint(len(fonts), (len(y),), generator=draw)
    x = _jitter(clean[y * len(fonts) + font], draw)
    return _split(x, y, held_out)


def _fonts(size: int) -> list[Any]:
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(p for p in folder.glob("DejaVu*.ttf") if "Display" not in p.name)
    return [ImageFont.truetype(str(p), int(size * 0.7)) for p in files]


def _render(character: str, font: Any, size: int) -> Tensor:
    from PIL import Image, ImageDraw

    image = Image.new("L", (size, size))
    ImageDraw.Draw(image).text((size / 2, size / 2), character, fill=255, font=font, anchor="mm")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, size, size) / 255


def _jitter(x: Tensor, draw: torch.Generator) -> Tensor:
    """Turn within 15 degrees, scale within 15 %, shift within 10 %, add noise, normalise."""
    angle, scale, dx, dy = (torch.rand(4, len(x), generator=draw) * 2 - 1).unbind()
    angle, scale = angle * 0.26, 1 + scale * 0.15
    cos, sin = angle.cos() * scale, angle.sin() * scale
    theta = torch.stack([cos, -sin, dx * 0.2, sin, cos, dy * 0.2], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    x = x + 0.1 * torch.randn(x.shape, generator=draw)
    return (x - x.mean()) / x.std()


CIFAR_MEAN, CIFAR_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def cifar100(folder: str | Path) -> Split:
    """CIFAR-100 from its "python version" folder (files ``train`` and ``test``), normalised."""
    train, test = (_cifar_file(Path(folder) / name) for name in ("train", "test"))
    return Split(*train, *test)


def _cifar_file(path: Path) -> tuple[Tensor, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(
            f"got no file {path}; expected the extracted folder cifar-100-python of "
            "https://www.cs.toronto.edu/~kriz/cifar.html, with files 'train' and 'test'"
        )
    raw = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    x = torch.tensor(raw[b"data"]).view(-1, 3, 32, 32).float() / 255
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    return (x - mean) / std, torch.tensor(raw[b"fine_labels"])


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and nothing else: a pickle from the network could run any code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"got {module}.{name} in a CIFAR file; expected only arrays")


def image_folder(folder: str | Path, size: int = 224, train: bool = True) -> Dataset:
    """An ImageNet-like folder, ``<folder>/<class>/<image>``, with the usual crops."""
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    crop = (
        [T.RandomResizedCrop(size), T.RandomHorizontalFlip()]
        if train
        else [T.Resize(round(size * 8 / 7)), T.CenterCrop(size)]
    )
    pipeline = T.Compose([*crop, T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    return ImageFolder(str(folder), pipeline)
