"""A language model's step where its head is what counts: time and peak, with and without chunks.

    python benchmarks/head.py --device cuda                      # GPT-2 124M and a Qwen3-like
    python benchmarks/head.py --models gpt2 --batch 1 --tokens 512 --depth 1 --dtype fp32
    python benchmarks/head.py --device cuda --models 8192x128256x4096,16384x50257x768 \\
        --configs exact,hot,hot:head=int8:accept=off,liger,cce          # heads alone, no looks

Forward and backward, bf16 autocast unless told otherwise, the configurations interleaved in one
process; the figure is the best round. ``peak`` is above what stands before the step: weights, no
gradients. ``returned``: the caller keeps the model's whole output, logits too, over the backward;
``loss``: the model returns its loss only. ``liger`` is stock with Liger's fused linear cross
entropy called by hand (``pip install liger-kernel``; CUDA), ``cce`` is cut-cross-entropy's. A model
"LxOxI" is a head alone, L rows and its weight being parameters of ``--dtype``.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._dynamo
import transformers
import typer
from report import document, environment, publish
from step import compile_for, compiler_settings, synchronize
from tables import heads
from torch import Tensor, nn
from torch.nn import functional as F

from hot_compile.frameworks import trace_past_warnings
from hot_compile.memory import peak_bytes

CONFIGS = "exact,exact+recompute,hot,hot:head=off,liger"
SIZES = {"gpt2": (8, 1024), "qwen3": (4, 2048)}
FUNCTIONS = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}
"""Others' losses, and where they are from."""


@dataclass
class Row:
    """One configuration's figures."""

    model: str
    gives: str
    config: str
    best_ms: float = float("inf")
    peak_bytes: int = 0
    loss: float = 0.0


class LossOnly(nn.Module):
    """A causal model that returns its loss only."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        return self.model(ids, labels=ids).loss


class Whole(LossOnly):
    """A causal model that returns what Hugging Face's do."""

    def forward(self, ids: Tensor) -> Any:
        """Loss and logits."""
        output = self.model(ids, labels=ids)
        return output.loss, output.logits


class Liger(LossOnly):
    """The same loss by Liger's kernel, as its patched models call it."""

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden = self.model.base_model(ids)[0][:, :-1].flatten(0, 1)
        weight = self.model.get_output_embeddings().weight.to(hidden.dtype)
        # its own kernels are not for Dynamo, which fails on them (torch 2.11, Liger 0.8)
        loss = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss())
        return loss(weight, hidden, ids[:, 1:].flatten())


class Alone(nn.Module):
    """A head and its loss, by a library's own function if ``config`` names one."""

    def __init__(self, rows: int, outputs: int, inputs: int):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, inputs))
        self.head = nn.Linear(inputs, outputs, bias=False)
        self.config = "exact"

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        labels = ids.flatten()
        if self.config == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            fused = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss())
            return fused(self.head.weight, self.rows, labels)
        if self.config == "cce":
            from cut_cross_entropy import linear_cross_entropy

            fused = torch.compiler.disable(linear_cross_entropy)
            return fused(self.rows, self.head.weight, labels)
        return F.cross_entropy(self.head(self.rows), labels)


def build(name: str, depth: int | None, vocabulary: int | None) -> nn.Module:
    """A model with random weights, no dropout."""
    if "x" in name:
        return Alone(*map(int, name.split("x")))
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=depth or 12,
            vocab_size=vocabulary or 50257,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.Qwen3Config(
        num_hidden_layers=depth or 4,
        vocab_size=vocabulary or 151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config)


class Stepper:
    """One configuration: its copy of the model and its figures."""

    def __init__(self, row: Row, model: nn.Module, ids: Tensor, bf16: bool):
        self.row, self.ids, self.bf16 = row, ids, bf16
        self.model = copy.deepcopy(model)
        if isinstance(self.model, Alone):
            self.model.config = row.config
        else:
            ways: dict[str, type[LossOnly]] = {"loss": LossOnly, "returned": Whole}
            self.model = (Liger if row.config == "liger" else ways[row.gives])(self.model)
        config = "exact" if row.config in FUNCTIONS else row.config
        self.call: Callable[..., Any] = compile_for(config, self.model)

    def step(self) -> Tensor:
        """Forward and backward; gradients are dropped, so that each step makes its own."""
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.call(self.ids)
        loss = output[0] if isinstance(output, tuple) else output
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss.detach()

    def measure(self) -> None:
        """One timed step."""
        synchronize(self.ids.device)
        start = time.perf_counter()
        loss = self.step()
        synchronize(self.ids.device)
        self.row.best_ms = min(self.row.best_ms, (time.perf_counter() - start) * 1e3)
        self.row.loss = loss.item()


def measure(
    name: str,
    gives: str,
    configs: list[str],
    model: nn.Module,
    ids: Tensor,
    dtype: str,
    rounds: int,
) -> list[Row]:
    """Figures of every configuration, interleaved."""
    with compiler_settings(dtype):
        rows = [Row(name, gives, config) for config in configs]
        steppers = [Stepper(row, model, ids, dtype == "bf16") for row in rows]
        for stepper in steppers:
            for _ in range(3):
                stepper.step()
            stepper.row.peak_bytes = peak_bytes(stepper.step, ids.device)
        for _ in range(rounds):
            for stepper in steppers:
                stepper.measure()
    return rows


def main(
    models: Annotated[str, typer.Option(help="gpt2, qwen3, or LxOxI: a head alone")] = "gpt2,qwen3",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, tf32 or bf16 (autocast)")] = "bf16",
    configs: Annotated[str, typer.Option(help="as for step.py, and liger")] = CONFIGS,
    gives: Annotated[str, typer.Option(help="comma-separated: returned, loss")] = "returned,loss",
    batch: Annotated[int | None, typer.Option(help="sequences, instead of the model's")] = None,
    tokens: Annotated[int | None, typer.Option(help="tokens of each, likewise")] = None,
    depth: Annotated[int | None, typer.Option(help="layers, likewise")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="columns of the head, likewise")] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
) -> list[Row]:
    """Measure steps of language models."""
    trace_past_warnings()
    where, rows = torch.device(device), []
    for name in models.split(","):
        torch.manual_seed(0)
        model = build(name, depth, vocabulary).to(where)
        if isinstance(model, Alone):
            model.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
            size, words = (1, len(model.rows)), model.head.out_features
        else:
            size = (batch or SIZES[name][0], tokens or SIZES[name][1])
            words = model.config.vocab_size
        ids = torch.randint(0, words, size, device=where)
        for kind in ["loss"] if isinstance(model, Alone) else gives.split(","):
            runs = [c for c in configs.split(",") if _can(c, where, model, kind)]
            rows += measure(name, kind, runs, model, ids, dtype, rounds)
    title = f"heads, {dtype}, {environment(where)['device']}"
    arguments = {"dtype": dtype, "depth": depth, "batch": batch, "tokens": tokens}
    publish(heads, document(where, arguments, rows), title, json_file)
    return rows


def _can(config: str, where: torch.device, model: nn.Module, kind: str) -> bool:
    """Others' losses run on CUDA, where they are installed, and return no logits."""
    if config not in FUNCTIONS:
        return True
    ready = where.type == "cuda" and bool(importlib.util.find_spec(FUNCTIONS[config]))
    return ready and kind == "loss" and (isinstance(model, Alone) or config == "liger")


if __name__ == "__main__":
    typer.run(main)
