"""(Site, config, rates, profile) -> whether a layer's forward product is on INT8, and why.

Pure functions, which ``plan`` calls: nothing else chooses.
"""

from __future__ import annotations

import dataclasses

from hot_compile.config import HotConfig
from hot_compile.passes.cost.linear import Rates, Shape
from hot_compile.passes.forward.product import Price
from hot_compile.passes.measure.profile import LayerProfile
from hot_compile.passes.site import Site, SiteNodes, hint


@dataclasses.dataclass(frozen=True)
class ForwardDecision:
    """What happens to one layer's forward product, and why."""

    site: str
    int8: bool
    reason: str
    predicted_gain: float = 1.0
    """Times faster than exact the product is predicted to be."""


def choose_forward(
    site: Site,
    config: HotConfig,
    rates: Rates | str,
    left_alone: str | None,
    layer: LayerProfile | None,
) -> ForwardDecision:
    """One layer's decision.

    Args:
        rates: of its device, or why nothing can run there.
        left_alone: why the backward's rules leave the layer alone, which hold here as well.
        layer: what calibration measured of it, if it did.
    """
    problem = _not_ours(site) or (rates if isinstance(rates, str) else left_alone)
    problem = problem or _over_budget(config, layer)
    if problem:
        return ForwardDecision(site.name, False, problem)
    assert isinstance(rates, Rates)
    price = _price(site, rates)
    gain = round(price.gain(), 3)
    if gain < config.min_gain:
        reason = f"not worth it: predicted {gain:.2f}x exact; {_would_pay(price, config.min_gain)}"
        return ForwardDecision(site.name, False, reason, gain)
    return ForwardDecision(site.name, True, _measured(layer), gain)


def _not_ours(site: Site) -> str | None:
    """Why no INT8 product can take the place of the layer's forward, whatever it costs."""
    if site.refusal:
        return site.refusal
    if not isinstance(site.nodes, SiteNodes):
        return "convolution: its forward stays exact"
    if site.first:
        return "first layer: it reads the graph's input"
    if hint(site.rows) == 0:
        return "empty batch"
    return None


def _over_budget(config: HotConfig, layer: LayerProfile | None) -> str | None:
    budget = config.forward_budget
    if layer is None or layer.forward is None or budget is None or layer.forward.error <= budget:
        return None
    return f"output error {layer.forward.error:.2g} over budget {budget:g}"


def _would_pay(price: Price, least: float) -> str:
    rows = price.rows_that_pay(least)
    if rows is None:
        return "no number of rows would change that"
    return f"it would pay from {rows} rows on"


def _measured(layer: LayerProfile | None) -> str:
    if layer is None or layer.forward is None:
        return ""
    return f"LQS: output error {layer.forward.error:.2g}"


def _price(site: Site, rates: Rates) -> Price:
    rows, outputs, inputs = map(hint, (site.rows, site.outputs, site.inputs))
    shape = Shape(rows, outputs, inputs, site.dtype.itemsize)
    dtype = str(site.dtype).removeprefix("torch.")
    assert isinstance(site.nodes, SiteNodes)
    return Price(rates, dtype, shape, site.nodes.weight_is_io)
