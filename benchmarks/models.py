"""The models whose training steps are measured, by name, with random weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000
LLAMA_TOKENS = 2048
LLAMA_VOCABULARY = 32000


@dataclass(frozen=True)
class Workload:
    """A model, its inputs, and the loss of a forward (compiled or not) on them."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """Overrides of a named model's own size; None keeps it."""

    batch: int
    depth: int | None = None
    width: int | None = None
    image: int | None = None
    tokens: int | None = None

    def times(self, parts: int) -> Size:
        """The same of a batch so many times as large."""
        return replace(self, batch=self.batch * parts)


LLAMAS: dict[str, dict[str, int]] = {
    "llama12x2048": {},
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""What tells them from 12 layers of 2048."""


class Block(nn.Module):
    """A residual MLP of few numbers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.body = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return x + self.body(x)


def build(name: str, size: Size) -> Workload:
    """``mlps``, ``llama12x2048``, ``llama8b`` (a few of its layers) or any timm model
    (``vit_base_patch16_224``, ``resnet50``, ...)."""
    if name == "mlps":
        blocks = nn.Sequential(*(Block() for _ in range(size.depth or 12)))
        x = torch.randn(size.batch, 64)
        return Workload(blocks, (x,), lambda forward, x: forward(x).square().mean())
    return _llama(size, LLAMAS[name]) if name in LLAMAS else _timm(name, size)


def _timm(name: str, size: Size) -> Workload:
    import timm

    changes: dict[str, Any] = {}
    if size.depth:
        changes["depth"] = size.depth
    if size.width:
        changes |= {"embed_dim": size.width, "num_heads": max(1, size.width // 64)}
    if size.image:
        changes["img_size"] = size.image
    model = timm.create_model(name, num_classes=CLASSES, **changes).train()
    image = size.image or model.default_cfg["input_size"][-1]
    x = torch.randn(size.batch, 3, image, image)
    y = torch.randint(CLASSES, (size.batch,))
    return Workload(model, (x, y), _classification_loss)


def _classification_loss(forward: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    logits = forward(x)
    if isinstance(logits, tuple):  # class and distillation heads
        return sum(F.cross_entropy(part, y) for part in logits) / len(logits)
    return F.cross_entropy(logits, y)


def _llama(size: Size, changes: dict[str, int]) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, tokens = size.width or 2048, size.tokens or LLAMA_TOKENS
    own = {
        "vocab_size": LLAMA_VOCABULARY,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": size.depth or 12,
        "num_attention_heads": width // 128,
        "max_position_embeddings": tokens,
    }
    config = LlamaConfig(use_cache=False, attn_implementation="sdpa", **own | changes)
    ids = torch.randint(config.vocab_size, (size.batch, tokens))
    return Workload(LlamaForCausalLM(config).train(), (ids,), _next_token_loss)


def _next_token_loss(forward: Callable[..., Any], ids: Tensor) -> Tensor:
    return forward(input_ids=ids, labels=ids, use_cache=False).loss
