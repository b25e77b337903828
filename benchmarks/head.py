"""Language models whose head counts, heads alone, and their loss by others' kernels.

Configuration ``liger`` is stock with Liger's fused linear cross entropy called by hand (``pip
install liger-kernel``; CUDA), ``cce`` with cut-cross-entropy's. A model "LxOxI" is a head alone: L
rows, and the weight, are parameters, of bf16 where steps are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

MODELS = ("gpt2", "qwen3")
FUNCTIONS = ("liger", "cce")
"""Configurations that are others' losses."""


class LossOnly(nn.Module):
    """A causal model that returns its loss only; ``config``: whose function makes it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.config = "exact"

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        if self.config not in FUNCTIONS:
            return self.model(ids, labels=ids).loss
        rows = self.model.base_model(ids)[0][:, :-1].flatten(0, 1)
        weight = self.model.get_output_embeddings().weight.to(rows.dtype)
        return _loss(self.config, rows, weight, ids[:, 1:].flatten())


class Alone(nn.Module):
    """A head and its loss."""

    def __init__(self, rows: int, outputs: int, inputs: int):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, inputs))
        self.head = nn.Linear(inputs, outputs, bias=False)
        self.config = "exact"

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        if self.config not in FUNCTIONS:
            return F.cross_entropy(self.head(self.rows), ids)
        return _loss(self.config, self.rows, self.head.weight, ids)


def _loss(name: str, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """By a library, whose own kernels are not for Dynamo (it fails on Liger's, torch 2.11)."""
    if name == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return torch.compiler.disable(linear_cross_entropy)(rows, weight, labels)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Callable[..., Any] = torch.compiler.disable(LigerFusedLinearCrossEntropyLoss())
    return loss(weight, rows, labels)


def build(name: str, depth: int | None) -> nn.Module:
    """One of ``MODELS`` with random weights, no dropout."""
    if name == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        small = transformers.GPT2Config(n_layer=depth or 12, **no_dropout, use_cache=False)
        return transformers.GPT2LMHeadModel(small)
    config = transformers.Qwen3Config(
        num_hidden_layers=depth or 4, vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)
