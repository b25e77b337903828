"""What is done to one layer: what ``plan`` decides and what ``rewrite`` carries out."""

from __future__ import annotations

import dataclasses
import math

import torch

from hot_compile.config import BASELINES, HotConfig, Rows, Strategy
from hot_compile.passes.base.site import Site, SiteNodes, hint
from hot_compile.passes.layers.fused import put_together
from hot_compile.passes.layers.strategies import STRATEGIES, How

_MIN_SAMPLES = 16


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one Site, and why."""

    site: str
    shape: tuple[str, str, str]
    """L, O, I as text; symbolic sizes keep their symbol."""
    dtype: str
    strategy: Strategy
    reason: str
    gx: bool
    """The graph computes g_x."""
    gw: bool
    """The graph computes g_w."""
    gx_bits: int
    per_channel: bool
    per_token: bool
    """Scales of g_y per row for g_x although the others are per tensor (the paper's LQS)."""
    rank: int
    """HLA rank for g_w; 0: rows are not transformed."""
    tokens: int
    """Rows of one sample (batch grouping); 1: consecutive rows."""
    predicted_gain: float
    """Times faster than exact the layer's backward is predicted to be."""
    bytes_before: int
    """x as exact Inductor would save it."""
    tiles: bool = False
    """HLA's 16 rows are a tile of a convolution's positions, not consecutive ones."""
    one_read: bool = False
    """g_y is quantised once, to 8 bits, for both products (docs/adr/0005)."""
    packed: bool = False
    """g_x's operands are packed two values a byte, for INT4 tensor cores (docs/adr/0008)."""
    seconds_won: float = 0.0
    """By which the layer's backward is predicted to be faster than exact; 0 where it stays so."""

    @property
    def way(self) -> str:
        """What is computed instead of the exact products, in a few words for tables."""
        if self.strategy is Strategy.EXACT or self.strategy in BASELINES:
            return str(self.strategy)
        if not self.gw or self.strategy is Strategy.GX_ONLY:
            return f"INT{self.gx_bits} g_x"
        if self.strategy is Strategy.GW_ONLY:
            return "INT8 g_w"
        words = "INT4 g_x, INT8 g_w" if self.gx and self.gx_bits == 4 else "INT8 products"
        return f"{words} (g_w: {self.rank} of 16 rows)" if self.rank else words

    def how(self, nodes: SiteNodes | None = None) -> How:
        """What a Linear's strategy is told."""
        return How(
            gx=self.gx,
            gw=self.gw,
            dtype=getattr(torch, self.dtype),
            gx_bits=self.gx_bits,
            per_row=self.per_channel or self.per_token,
            per_channel=self.per_channel,
            rank=self.rank,
            tokens=self.tokens,
            packed=self.packed,
            one_read=self.one_read,
            fused=self.one_read and nodes is not None and put_together(nodes.grad_output),
            summed=self.one_read and nodes is not None and nodes.grad_bias is not None,
            weight_is_io=nodes is not None and nodes.weight_is_io,
            grad_weight_is_io=nodes is not None and nodes.grad_weight_is_io,
        )


def decided(
    site: Site, config: HotConfig, strategy: Strategy, reason: str, gx_bits: int, per_token: bool
) -> Decision:
    """What ``strategy`` means for a layer, without what only a device's rates can say."""
    spec = STRATEGIES[strategy]
    return Decision(
        site=site.name,
        shape=(str(site.rows), str(site.outputs), str(site.inputs)),
        dtype=str(site.dtype).removeprefix("torch."),
        strategy=strategy,
        reason=reason,
        gx=site.needs_grad_input,
        gw=site.needs_grad_weight,
        gx_bits=gx_bits,
        per_channel=config.per_channel,
        per_token=per_token,
        rank=config.rank if spec.low_rank else 0,
        tokens=(
            math.prod(map(int, site.lead[1:])) if grouped_by_sample(site, strategy, config) else 1
        ),
        predicted_gain=1.0,
        bytes_before=0,
        tiles=spec.grouped and site.conv is not None and config.rows is Rows.BATCH,
    )


def forced(site: Site, config: HotConfig, strategy: Strategy) -> Decision:
    """The decision that gives the layer ``strategy`` whatever speaks against it: for measuring."""
    return decided(site, config, strategy, "", config.gx_bits or 8, bool(config.per_token))


def grouped_by_sample(site: Site, strategy: Strategy, config: HotConfig) -> bool:
    """Rows are grouped across the batch; a convolution's by spatial tiles instead."""
    return STRATEGIES[strategy].grouped and config.rows is Rows.BATCH and site.conv is None


def batch_problem(site: Site) -> str | None:
    """Why rows cannot be grouped across the batch, or None."""
    if not site.batched:
        return "its first dimension is not the batch"
    if hint(site.lead[0]) < _MIN_SAMPLES:
        return f"batch of {hint(site.lead[0])}, grouping wants {_MIN_SAMPLES}"
    if not all(isinstance(size, int) for size in site.lead[1:]):
        return "tokens per sample are symbolic"
    return None
