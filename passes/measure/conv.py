"""How far each strategy's gradients of one convolution are from exact, by the nodes that would run.

What is measured is the very function that ``rewrite`` builds a graph's nodes with. Results are 0-d
fp32 tensors on the layer's device: nothing here waits for it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hot_compile.config import HotConfig, Rows, Strategy
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.site import ConvNodes, Site
from hot_compile.passes.layers.decision import Decision, forced
from hot_compile.passes.layers.positions import rows_of
from hot_compile.passes.layers.rewrite_conv import ConvStrategy
from hot_compile.passes.measure.linear import (
    compare,
    granule_errors,
)
from hot_compile.passes.profile.profile import config_variant, gx_variant

Gradients = tuple[Tensor | None, Tensor | None]
"""(g_x, g_w) in fp32; None where the layer's backward has no such result."""
Pairs = dict[str, tuple[Tensor, Tensor]]
"""{variant: (error, cosine)}."""
_GW_STRATEGIES = (
    (Strategy.HLA8, Rows.BATCH),
    (Strategy.HLA8, Rows.CONSECUTIVE),
    (Strategy.INT8, Rows.BATCH),
)


def quantised_conv_gradients(
    site: Site, decision: Decision, g: Tensor, weight: Tensor, x: Tensor
) -> Gradients:
    """What the rewritten graph computes: of those that ``site`` wants, and ``decision`` changes.

    Shapes are the convolution's own: g [B, O, *small], weight [O, I, *kernel], x [B, I, *big].
    """
    assert isinstance(site.nodes, ConvNodes)
    assert site.conv is not None
    own = site.nodes
    if site.conv.transposed and not site.conv.is_product:
        own = dataclasses.replace(own, grad_input=None)  # stays exact
    if decision.strategy is Strategy.GW_ONLY:
        own = dataclasses.replace(own, grad_input=None)
    if decision.strategy is Strategy.GX_ONLY:
        own = dataclasses.replace(own, grad_weight=None)
    own = dataclasses.replace(own, grad_bias=None)
    measured = dataclasses.replace(site, nodes=own)
    strategy = ConvStrategy(measured, decision, dtype=torch.float32)
    gx, gw, _ = strategy.gradients(g, weight, strategy.keep(x))
    return gx, gw


def exact_conv_gradients(site: Site, g: Tensor, weight: Tensor, x: Tensor) -> Gradients:
    """The same without quantisation."""
    assert isinstance(site.nodes, ConvNodes)
    settings = site.nodes.backward.args[4:10]
    mask = [site.needs_grad_input, site.needs_grad_weight, False]
    operands = (g.float(), x.float(), weight.float())
    gx, gw, _ = aten.convolution_backward.default(*operands, None, *settings, mask)
    return gx, gw


def conv_measures(
    site: Site, g: Tensor, weight: Tensor, x: Tensor, rank: int
) -> tuple[Pairs, Pairs]:
    """(measures of g_x for every width and granule, of g_w for every strategy, grouping, granule).

    As ``measure.grad_input_measures`` and ``grad_weight_measures``; empty where the gradient is not
    wanted or stays exact. ``hla8/batch`` stands for tiles of positions (docs/adr/0006).
    """
    want_gx, want_gw = exact_conv_gradients(site, g, weight, x)
    gx: Pairs = {}
    gw: Pairs = {}
    for per_channel in (True, False):
        for bits in (4, 8) if want_gx is not None else ():
            config = HotConfig(gx_bits=bits, per_channel=per_channel, rank=rank)
            decision = forced(site, config, Strategy.GX_ONLY)
            got, _ = quantised_conv_gradients(site, decision, g, weight, x)
            if got is not None and want_gx is not None:
                gx[gx_variant(bits, per_channel)] = compare(got, want_gx)
        for strategy, rows in _GW_STRATEGIES if want_gw is not None else ():
            config = HotConfig(gx_bits=8, per_channel=per_channel, rank=rank, rows=rows)
            decision = forced(_weight_only(site), config, strategy)
            _, got = quantised_conv_gradients(_weight_only(site), decision, g, weight, x)
            if got is not None and want_gw is not None:
                gw[config_variant(strategy, config)] = compare(got, want_gw)
    return gx, gw


def _weight_only(site: Site) -> Site:
    assert isinstance(site.nodes, ConvNodes)
    return dataclasses.replace(site, nodes=dataclasses.replace(site.nodes, grad_input=None))


def conv_granule_errors(g: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``measure.granule_errors`` of g_y, a row for each position."""
    return granule_errors(rows_of(g), rank)
