"""Distillation by hand: a small model learns a larger one's predictions, both in one function.

Neither the student's logits nor the teacher's exist as a whole. Nothing is downloaded: both are
tiny Llamas with random weights, which read Python's own source.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import learn
from finetune_lora import TINY
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


def distilled(
    student: nn.Module, teacher: nn.Module, ids: Tensor, temperature: float, hard: float
) -> Tensor:
    """KL to the teacher at a temperature, and ``hard`` times the cross entropy of the text."""
    with torch.no_grad():
        theirs = teacher(input_ids=ids).logits[:, :-1].float()
    mine = student(input_ids=ids).logits[:, :-1].float()
    soft = F.kl_div(
        (mine / temperature).log_softmax(-1),
        (theirs / temperature).log_softmax(-1),
        reduction="none",
        log_target=True,
    )
    loss = F.cross_entropy(mine.flatten(0, 1), ids[:, 1:].flatten())
    return temperature**2 * soft.sum(-1).mean() + hard * loss


def main(
    backend: Annotated[str, typer.Option(help="hot, or inductor to compare")] = "hot",
    steps: Annotated[int, typer.Option(min=1)] = 100,
    batch: Annotated[int, typer.Option(min=1, help="sequences in a step")] = 8,
    length: Annotated[int, typer.Option(min=2, help="tokens in a sequence")] = 256,
    temperature: Annotated[float, typer.Option(help="of both models' predictions")] = 2.0,
    hard: Annotated[float, typer.Option(help="weight of the text's own tokens")] = 0.5,
    quick: Annotated[bool, typer.Option(help="a few steps only")] = False,
) -> list[float]:
    """Train and print the loss now and then."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = min(steps, 8) if quick else steps
    teacher = LlamaForCausalLM(LlamaConfig(**TINY)).to(device).requires_grad_(False)
    student = LlamaForCausalLM(LlamaConfig(**TINY | {"num_hidden_layers": 1})).to(device)
    loss_of = torch.compile(distilled, backend=backend)  # the one line
    ids = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    def loss_of_a_batch() -> Tensor:
        starts = torch.randint(len(ids) - length, (batch,))
        rows = torch.stack([ids[start : start + length] for start in starts.tolist()]).to(device)
        return loss_of(student, teacher, rows, temperature, hard)

    return learn(loss_of_a_batch, optimizer, steps)


if __name__ == "__main__":
    typer.run(main)
