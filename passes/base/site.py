"""A Site: one layer's backward products as found in the joint graph. Match makes, plan reads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import CHANNEL_DIM

IntLike = int | torch.SymInt


@dataclasses.dataclass(frozen=True)
class SiteNodes:
    """Where the Site lives in the graph. ``None`` where the graph has no such product."""

    x: fx.Node | None
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
    forward: fx.Node | None
    """None, as ``x`` is, where no product that we know multiplies: with weights of 4 bits, say."""
    grad_bias: fx.Node | None = None
    """The sum of g_y's rows, where the graph wants it."""


@dataclasses.dataclass(frozen=True)
class ConvNodes:
    """Where a convolution's backward lives in the graph. ``None`` where it has no such result."""

    x: fx.Node
    """[B, C_in, *size]."""
    weight: fx.Node
    """[C_out, C_in, *kernel]; of a transposed convolution [C_in, C_out, *kernel]."""
    grad_output: fx.Node
    """[B, C_out, *size]."""
    backward: fx.Node
    """The ``convolution_backward``."""
    grad_input: fx.Node | None
    """getitem giving g_x."""
    grad_weight: fx.Node | None
    """getitem giving g_w."""
    grad_bias: fx.Node | None
    """getitem giving g_b, where the graph did not make it a sum of its own."""
    forward: fx.Node


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Geometry of a convolution with groups = 1, in 1 to 3 spatial dimensions.

    Its *small* tensor has one value for every kernel position (y; transposed: x), its *big* one is
    what the kernel slides over (x; transposed: y).
    """

    batch: IntLike
    small_size: tuple[int, ...]
    """Symbolic only in a refused Site."""
    big_size: tuple[int, ...]
    big_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    rows_last: bool
    """x has its channels last in memory, so that its rows are a view."""

    @property
    def is_product(self) -> bool:
        """Kernel 1, stride 1, no padding: a plain product over positions."""
        ones = (*self.kernel, *self.stride)
        return all(n == 1 for n in ones) and not any(self.padding)

    @property
    def offsets(self) -> int:
        """kk: positions of the kernel."""
        return math.prod(self.kernel)


@dataclasses.dataclass(frozen=True)
class Site:
    """One Linear-like layer: y = x W^T with x [L, I], W [O, I].

    A convolution is one too (``conv``): L counts small positions, O the channels of y and I those
    of x, times the kernel's offsets on the big side. A product that is not understood is a Site
    with a ``refusal`` and no ``nodes``.
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
    nodes: SiteNodes | ConvNodes | None = dataclasses.field(default=None, compare=False, repr=False)
    conv: Convolution | None = None
    scores: bool = False
    """Its output enters a softmax through views and casts only: of a loss, of a router."""
    first: bool = False
    """It reads the user's input, for which the graph computes no gradient: a stem, an embedding."""

    @property
    def needs_grad_input(self) -> bool:
        """The graph computes g_x."""
        return self.nodes is not None and self.nodes.grad_input is not None

    @property
    def needs_grad_weight(self) -> bool:
        """The graph computes g_w."""
        return self.nodes is not None and self.nodes.grad_weight is not None


def hint(value: IntLike | Any) -> int:
    """The number itself, or for a symbolic one the size it was traced with; 1 for a ragged one."""
    if isinstance(value, int):
        return value
    known = value.node.hint
    return 1 if known is None or isinstance(known, torch.SymInt) else int(known)


def bytes_of(value: torch.Tensor) -> int:
    """Bytes of a fake tensor, symbolic sizes by hint."""
    return elements_of(value) * value.dtype.itemsize


def positions_of(value: torch.Tensor) -> int:
    """Positions of a fake image [B, C, ...], symbolic sizes by hint."""
    return math.prod(map(hint, value.shape[CHANNEL_DIM + 1 :]))


def elements_of(value: torch.Tensor) -> int:
    """Elements of a fake tensor, symbolic sizes by hint."""
    return math.prod(map(hint, value.shape))
