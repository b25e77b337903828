"""(Site, config, rates, profile) -> whether a layer's forward product is on INT8, and why.

Pure functions, which ``plan`` calls: nothing else chooses.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from hot_compile.config import HotConfig
from hot_compile.passes.base.graph import strip
from hot_compile.passes.base.operators import CASTS, VIEWS, is_pointwise
from hot_compile.passes.base.site import Site, SiteNodes, hint
from hot_compile.passes.cost.linear import Price, Rates, Shape
from hot_compile.passes.forward.product import Form, forward_price
from hot_compile.passes.profile.profile import PLAIN, ROTATED, LayerProfile
from hot_compile.runtime.reference.sizes import CONTRACT_ALIGN

_AS_GOOD = 1.25
"""Rotation buys nothing where the error without it is at most this many times as large."""


@dataclasses.dataclass(frozen=True)
class ForwardDecision:
    """What happens to one layer's forward product, and why."""

    site: str
    int8: bool
    reason: str
    predicted_gain: float = 1.0
    """Times faster than exact the product is predicted to be."""
    rotated: bool = True
    """If on INT8: of operands transformed along I, in blocks of 16."""
    seconds_won: float = 0.0
    """By which the product is predicted to be faster than exact."""

    @property
    def way(self) -> str:
        """In a word or two, for tables."""
        return ("int8" if self.rotated else "int8, not rotated") if self.int8 else "exact"


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
    if config.keep_head:
        problem = problem or _is_read_as_it_is(site)
    problem = problem or _over_budget(config, layer)
    if problem:
        return ForwardDecision(site.name, False, problem)
    assert isinstance(rates, Rates)
    price, rotated = _price(site, rates, True), True
    if _needs_no_rotation(site, layer, rates):
        plain = _price(site, rates, False)
        if plain.gain() > price.gain():
            price, rotated = plain, False
    gain = round(price.gain(), 3)
    if gain < config.min_gain:
        would = would_pay(price, "number of rows", config.min_gain)
        reason = f"not worth it: predicted {gain:.2f}x exact; {would}"
        return ForwardDecision(site.name, False, reason, gain)
    exact, ours = price.times()
    return ForwardDecision(site.name, True, _measured(layer, rotated), gain, rotated, exact - ours)


def would_pay(price: Price, what: str, least: float) -> str:
    """From how much of ``what`` on it is ``least`` times faster, for people."""
    count = price.pays_from(least)
    if count is None:
        return f"no {what} would change that"
    return f"it would pay from {f'a batch of {count}' if what == 'batch' else f'{count} rows'} on"


def _not_ours(site: Site) -> str | None:
    """Why no INT8 product can take the place of the layer's forward, whatever it costs."""
    if site.refusal:
        return site.refusal
    if site.first:
        return "first layer: it reads the graph's input"
    if hint(site.rows) == 0:
        return "empty batch"
    if site.nodes is not None and site.nodes.forward is None:
        return "an operator of its own multiplies"
    return "convolution: it has no 8-bit forward" if site.conv else None


def _is_read_as_it_is(site: Site) -> str | None:
    if site.scores:
        return "a softmax reads it: a head or a router"
    return "head: its output is the model's" if site.head else None


def _over_budget(config: HotConfig, layer: LayerProfile | None) -> str | None:
    measured, budget = layer.forward.get(ROTATED) if layer else None, config.forward_budget
    if measured is None or budget is None or measured.error <= budget:
        return None
    return f"output error {measured.error:.2g} over budget {budget:g}"


def _needs_no_rotation(site: Site, layer: LayerProfile | None, rates: Rates) -> bool:
    """It was measured to buy nothing, and x is rounded as it is where it is made. On trust every
    layer is rotated: outliers are common."""
    if layer is None or not {ROTATED, PLAIN} <= layer.forward.keys():
        return False
    assert isinstance(site.nodes, SiteNodes)
    assert site.nodes.x is not None
    if not _fuses(site.nodes.x, rates):
        return False
    if not isinstance(site.inputs, int) or site.inputs % CONTRACT_ALIGN:
        return False  # what the product's operands are padded to
    return layer.forward[PLAIN].error <= _AS_GOOD * layer.forward[ROTATED].error


def _fuses(x: fx.Node, rates: Rates) -> bool:
    """Inductor quantises x in the kernel that makes it, at no cost but writing.

    Not on a CPU, where such a kernel computes x twice, for its absmax and for its integers: behind
    a GELU that takes longer than reading x again (docs/adr/0018).
    """
    return rates.asynchronous and is_pointwise(strip(x, VIEWS | CASTS))


def _measured(layer: LayerProfile | None, rotated: bool) -> str:
    measured = layer.forward.get(ROTATED if rotated else PLAIN) if layer else None
    return "" if measured is None else f"LQS: output error {measured.error:.2g}"


def _price(site: Site, rates: Rates, rotated: bool) -> Price:
    rows, outputs, inputs = map(hint, (site.rows, site.outputs, site.inputs))
    shape = Shape(rows, outputs, inputs, site.dtype.itemsize)
    dtype, nodes = str(site.dtype).removeprefix("torch."), site.nodes
    assert isinstance(nodes, SiteNodes)
    return forward_price(rates, dtype, shape, Form(rotated, nodes.weight_is_io, fused=not rotated))
