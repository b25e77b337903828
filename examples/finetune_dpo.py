"""Preference training (DPO) by hand: policy and reference in one compiled function.

Neither model's logits exist as a whole. Nothing is downloaded: two tiny Llamas with random weights
learn to prefer Python's own source to the same with its bytes turned around.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import learn
from finetune_lora import tiny_model
from torch import Tensor, nn


def log_probability(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """[rows]: of each sequence's tokens where ``mask`` [rows, tokens] is 1, as ``model`` has it."""
    logits = model(input_ids=ids).logits[:, :-1]
    chosen = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (chosen * mask[:, 1:]).sum(-1)


def dpo(policy: nn.Module, reference: nn.Module, ids: Tensor, mask: Tensor, beta: float) -> Tensor:
    """The loss; the first half of ``ids`` is preferred to the second, row by row."""
    with torch.no_grad():
        usual = log_probability(reference, ids, mask)
    gain = log_probability(policy, ids, mask) - usual
    chosen, rejected = gain.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def main(
    backend: Annotated[str, typer.Option(help="hot, or inductor to compare")] = "hot",
    steps: Annotated[int, typer.Option(min=1)] = 100,
    pairs: Annotated[int, typer.Option(min=1, help="pairs in a step")] = 4,
    length: Annotated[int, typer.Option(min=2, help="tokens in a sequence")] = 256,
    beta: Annotated[float, typer.Option(help="how far the policy may go")] = 0.1,
    quick: Annotated[bool, typer.Option(help="a few steps only")] = False,
) -> list[float]:
    """Train and print the loss now and then."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = min(steps, 8) if quick else steps
    policy = tiny_model().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    loss_of = torch.compile(dpo, backend=backend)  # the one line
    ids = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    mask = torch.ones(2 * pairs, length, device=device)
    mask[:, : length // 8] = 0  # the prompt
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)

    def loss_of_a_batch() -> Tensor:
        starts = torch.randint(len(ids) - length, (pairs,))
        rows = torch.stack([ids[start : start + length] for start in starts.tolist()])
        return loss_of(policy, reference, torch.cat([rows, rows.flip(1)]).to(device), mask, beta)

    return learn(loss_of_a_batch, optimizer, steps)


if __name__ == "__main__":
    typer.run(main)
