"""Fine-tune a causal language model by LoRA; the one line is ``model.compile(backend="hot")``.

Without ``--model`` a tiny Llama with random weights is made; without ``--text`` it learns a file of
Python's own source. Nothing is downloaded then.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import learn
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TINY = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tiny_model() -> nn.Module:
    """A Llama that reads bytes."""
    return LlamaForCausalLM(LlamaConfig(**TINY))


def token_ids(name: str | None, text: str) -> Tensor:
    """The text as one row of ids: a tokenizer's, or bytes for the tiny model."""
    if name is None:
        return torch.tensor(list(text.encode()))
    return AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]


def main(
    model: Annotated[str | None, typer.Option(help="a name on the hub, or a folder")] = None,
    text: Annotated[Path | None, typer.Option(help="what to learn")] = None,
    backend: Annotated[str, typer.Option(help="hot, or inductor to compare")] = "hot",
    steps: Annotated[int, typer.Option(min=1)] = 200,
    batch: Annotated[int, typer.Option(min=1, help="sequences in a step")] = 8,
    length: Annotated[int, typer.Option(min=2, help="tokens in a sequence")] = 256,
    rank: Annotated[int, typer.Option(min=1, help="LoRA's r")] = 16,
    checkpointed: Annotated[bool, typer.Option(help="keep blocks' inputs only")] = False,
    out: Annotated[Path, typer.Option(help="folder for the adapter")] = Path("lora-adapter"),
    quick: Annotated[bool, typer.Option(help="a few steps only")] = False,
) -> list[float]:
    """Train, print the loss now and then, and keep the adapter."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = min(steps, 8) if quick else steps
    base = tiny_model() if model is None else AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear")).to(device)
    adapted.print_trainable_parameters()
    if checkpointed:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.disable_input_require_grads()  # what transformers enabled breaks the graph
    adapted.compile(backend=backend)  # the one line
    content = (text or Path(argparse.__file__)).read_text()
    ids = token_ids(model, content)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)

    def loss_of_a_batch() -> Tensor:
        starts = torch.randint(len(ids) - length, (batch,))
        rows = torch.stack([ids[start : start + length] for start in starts.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16):
            return adapted(input_ids=rows, labels=rows).loss

    losses = learn(loss_of_a_batch, optimizer, steps)
    adapted.save_pretrained(out)
    return losses


if __name__ == "__main__":
    typer.run(main)
