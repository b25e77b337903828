"""A Site: one layer's backward products as found in the joint graph. Match makes, plan reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

IntLike = int | torch.SymInt


@dataclasses.dataclass(frozen=True)
class SiteNodes:
    """Where the Site lives in the graph. ``None`` where the graph has no such product."""

    x: fx.Node
    """[L, I], the operand the forward product read (after views and casts)."""
    weight: fx.Node
    """[O, I], or [I, O] when ``weight_is_io``, with transposes stripped."""
    weight_is_io: bool
    grad_output: fx.Node
    """[L, O]."""
    grad_input: fx.Node | None
    """mm giving g_x [L, I]."""
    grad_weight: fx.Node | None
    """mm giving g_w [O, I], or [I, O] when ``grad_weight_is_io``."""
    grad_weight_is_io: bool
    forward: fx.Node


@dataclasses.dataclass(frozen=True)
class Site:
    """One Linear-like layer: y = x W^T with x [L, I], W [O, I].

    A product that is not understood is a Site with a ``refusal`` and no ``nodes``.
    """

    name: str
    """Module path, e.g. ``blocks.0.attn.qkv``; unique within a graph."""
    rows: IntLike
    """L; symbolic when the batch is dynamic."""
    outputs: IntLike
    inputs: IntLike
    dtype: torch.dtype
    device: torch.device
    lead: tuple[IntLike, ...]
    """Leading dimensions of the layer's own input, e.g. (B, T); their product is L."""
    batched: bool
    """The first leading dimension is the batch of the user's inputs."""
    head: bool
    """The layer's output is the model's output: a classifier head."""
    refusal: str | None = None
    nodes: SiteNodes | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def needs_grad_input(self) -> bool:
        """The graph computes g_x."""
        return self.nodes is not None and self.nodes.grad_input is not None

    @property
    def needs_grad_weight(self) -> bool:
        """The graph computes g_w."""
        return self.nodes is not None and self.nodes.grad_weight is not None


def hint(value: IntLike | Any) -> int:
    """The number itself, or for a symbolic one the size it was traced with."""
    if isinstance(value, int):
        return value
    known = value.node.hint
    return int(known) if known is not None else 1
