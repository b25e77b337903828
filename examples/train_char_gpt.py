"""Train a small GPT on Python's own source text with exact Inductor, then with HOT, and compare."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import OUT, Batches, Device, Out, Quick, Recipe, Run, Seed, Task, compare
from data import CHARACTERS, python_source
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 16
STEPS = 400
CONTEXT = 128
LEARNING_RATE = 2e-3
HELD_OUT_BATCHES = 16


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Samples x characters x width, in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class CharGPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        self.apply(_small_init)

    def forward(self, ids: Tensor) -> Tensor:
        """Samples x characters in, with one logit per vocabulary entry out."""
        return self.head(self.norm(self.blocks(self.token(ids) + self.position)))


def _small_init(module: nn.Module) -> None:
    """GPT-2's initial weights, without which short runs spend their steps on recovering."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _windows(text: Tensor, draw: torch.Generator) -> Batches:
    """Endless batches of random windows and, one character later, their targets."""
    while True:
        start = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
        window = text[start + torch.arange(CONTEXT + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


@torch.no_grad()
def _loss(model: nn.Module, text: Tensor, device: torch.device) -> float:
    """Mean loss on windows of unseen files, always the same ones."""
    batches = _windows(text, torch.Generator().manual_seed(0))
    total = 0.0
    for _ in range(HELD_OUT_BATCHES):
        x, y = next(batches)
        total += F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten()).item()
    return total / HELD_OUT_BATCHES


def char_gpt_task(steps: int = STEPS, quick: bool = False, device: str = "cpu") -> Task:
    """The GPT on source text; ``quick`` is only enough to see that every step of it works."""
    train, held_out = python_source(limit=200_000 if quick else 4_000_000)
    where = torch.device(device)
    width, depth = (64, 1) if quick else (256, 3)
    return Task(
        build=lambda: CharGPT(width, depth),
        batches=lambda draw: _windows(train, draw),
        evaluate=lambda model: _loss(model, held_out, where),
        metric="loss",
        steps=8 if quick else steps,
        learning_rate=LEARNING_RATE,
        device=where,
    )


def main(
    recipe: Recipe = "hot",
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(help="training steps of 2048 characters")] = STEPS,
    out: Out = OUT,
    device: Device = "cpu",
    quick: Quick = False,
) -> list[Run]:
    """Train with exact Inductor, then with HOT: same seed, same weights, same batches."""
    return compare(char_gpt_task(steps, quick, device), recipe, seed, out / "char_gpt.png")


if __name__ == "__main__":
    typer.run(main)
