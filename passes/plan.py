"""(Sites, config, device) -> Plan: a pure function. All choosing happens here and nowhere else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from hot_compile.config import BASELINES, HotConfig, Strategy
from hot_compile.passes.base.site import Site, SiteNodes, elements_of, hint
from hot_compile.passes.cost.conv import NO_CONVOLUTIONS, backward_price
from hot_compile.passes.cost.linear import (
    Price,
    Rates,
    Shape,
    layer_bytes,
    layer_price,
)
from hot_compile.passes.exact.forms import Candidate, FormDecision
from hot_compile.passes.forward.choose import ForwardDecision, choose_forward, would_pay
from hot_compile.passes.head.plan import HeadDecision
from hot_compile.passes.layers.decision import (
    Decision,
    batch_problem,
    decided,
    grouped_by_sample,
)
from hot_compile.passes.layers.strategies import STRATEGIES, Spec
from hot_compile.passes.profile import lqs
from hot_compile.passes.profile.profile import LayerProfile, Profile
from hot_compile.passes.storage.predicted_peak import LEAST
from hot_compile.passes.storage.step_time import StepTime
from hot_compile.runtime.reference.sizes import ONE_READ_RANKS

PLAN_VERSION = 5
_LOW_RANK = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every Site's decision. Frozen, hashable, printable."""

    recipe: str
    decisions: tuple[Decision, ...]
    exact_forms: tuple[FormDecision, ...] = ()
    """Of what stays exact and has a faster form: whether it gets it."""
    heads: tuple[HeadDecision, ...] = ()
    """Products whose results only feed a loss, which go in chunks together with it."""
    forwards: tuple[ForwardDecision, ...] = ()
    """Whether each layer's forward product is on INT8; empty where options leave all exact."""
    rates: tuple[str, ...] = ()
    """Where the rates come from that the layers' devices were priced by."""
    step: StepTime | None = None
    """About what a step takes as it comes, where what is stored depends on that."""
    known: str = ""
    """What earlier runs found and this one heeds, in words."""

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __getitem__(self, site: str) -> Decision:
        for decision in self.decisions:
            if decision.site == site:
                return decision
        raise KeyError(f"got layer {site!r}; the plan has {[d.site for d in self.decisions]}")

    @property
    def rewritten(self) -> tuple[Decision, ...]:
        """The decisions that change the graph."""
        return tuple(d for d in self.decisions if d.strategy is not Strategy.EXACT)

    @property
    def seconds_won(self) -> float:
        """By which layers are predicted to make a step faster than exact ones do."""
        layers = sum(d.seconds_won for d in self.decisions)
        return layers + sum(f.seconds_won for f in self.forwards if f.int8)

    @property
    def seconds_won_by_forms(self) -> float:
        """By which exact forms are."""
        return sum(form.seconds_won for form in self.exact_forms if form.taken)

    @property
    def choice(self) -> tuple[tuple[object, ...], ...]:
        """What was chosen, without the reasons: equal where the code comes out the same."""
        layers = tuple((d.site, d.strategy, d.gx_bits, d.per_token) for d in self.decisions)
        forwards = tuple((f.site, f.way) for f in self.forwards)
        forms = tuple((form.layer, form.form, form.taken) for form in self.exact_forms)
        return layers + forwards + forms + tuple((h.name, h.way) for h in self.heads)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        decisions = [
            {**dataclasses.asdict(d), "shape": list(d.shape), "strategy": d.strategy.value}
            for d in self.decisions
        ]
        forms = [dataclasses.asdict(form) for form in self.exact_forms]
        heads = [{**dataclasses.asdict(h), "shape": list(h.shape)} for h in self.heads]
        forwards = [dataclasses.asdict(forward) for forward in self.forwards]
        return {
            "version": PLAN_VERSION,
            "recipe": self.recipe,
            "decisions": decisions,
            "exact_forms": forms,
            "heads": heads,
            "forwards": forwards,
            "rates": list(self.rates),
            "step": dataclasses.asdict(self.step) if self.step else None,
            "known": self.known,
        }


Prices = Mapping[torch.device, "Rates | str"]
"""By device: its rates, or the reason why nothing can run there."""


def plan(
    sites: Sequence[Site],
    config: HotConfig,
    prices: Prices,
    profile: Profile | None = None,
    found: Sequence[Candidate] = (),
    room: Callable[[fx.Node], int] | None = None,
) -> Plan:
    """Choose a strategy for every Site, its forward, and which operators get a faster exact form.

    Args:
        sites: what ``match`` found.
        config: the user's recipe and options.
        prices: of every Site's device.
        profile: what calibration measured of this model, if it did.
        found: what can take an exact form.
        room: bytes that a layer may make where its first exact product stands, until the step
            takes more memory than it does exact.

    Raises:
        ProfileMismatchError: the profile is of another model.
    """
    if profile is not None and config.lqs == "off":  # what was observed may lack idle layers
        profile.check(sites, config.rank)
    layers = profile.layers if profile is not None else {}
    own = dict(config.rates)
    prices = {d: r if isinstance(r, str) else r.override(own) for d, r in prices.items()}
    decisions = [_decide(site, config, prices, layers.get(site.name), room) for site in sites]
    forwards = _forwards(sites, config, prices, layers) if config.forward == "int8" else ()
    chosen = [s for s, f in zip(sites, forwards) if f.int8]  # noqa: B905  (or no forwards at all)
    taken = dict.fromkeys(_products(chosen), "its forward is rewritten")
    pairs = zip(sites, decisions, strict=True)
    chosen = [s for s, d in pairs if d.strategy is not Strategy.EXACT]
    taken |= dict.fromkeys(_products(chosen), "its backward is rewritten")
    forms = (_decide_form(candidate, config, taken) for candidate in found)
    known = (rates.source for rates in prices.values() if not isinstance(rates, str))
    rates = tuple(dict.fromkeys(known))
    return Plan(config.recipe, tuple(decisions), tuple(forms), forwards=forwards, rates=rates)


def _products(sites: Sequence[Site]) -> Iterator[fx.Node]:
    """What computes the sites' outputs, as far as it is known."""
    made = (site.nodes.forward for site in sites if site.nodes is not None)
    return (node for node in made if node is not None)


def _forwards(
    sites: Sequence[Site], config: HotConfig, prices: Prices, layers: Mapping[str, LayerProfile]
) -> tuple[ForwardDecision, ...]:
    """Which layers' forward products are on INT8. An override to "exact" is one of both sides."""
    decisions = []
    for site in sites:
        left = "chosen by override" if config.overridden(site.name) is Strategy.EXACT else None
        left = left or _excluded(site, config)
        if any(fnmatchcase(site.name, glob) for glob in config.forward_exact):
            left = left or "in forward_exact"
        args = (site, config, prices[site.device], left, layers.get(site.name))
        decisions.append(choose_forward(*args))
    return tuple(decisions)


def _decide_form(
    candidate: Candidate, config: HotConfig, rewritten: Mapping[fx.Node, str]
) -> FormDecision:
    """Whether an exact operator gets its faster form. ``rewritten``: what is not exact, and why."""
    problem = _not_asked_for(candidate.layer, config)
    if not config.exact_forms:
        problem = "exact_forms=False"
    elif candidate.node in rewritten:
        problem = rewritten[candidate.node]
    problem = problem or candidate.form.pays(candidate.reads, candidate.tf32)
    saves = 0.0 if problem else candidate.form.saves(candidate.node)
    problem = problem or ("" if saves else "was not timed to be faster on this device")
    reason = problem or "as exact, and faster on this device"
    seconds = saves * elements_of(candidate.reads)
    return FormDecision(candidate.layer, candidate.form.name, not problem, reason, seconds)


def _decide(
    site: Site,
    config: HotConfig,
    prices: Prices,
    layer: LayerProfile | None,
    room: Callable[[fx.Node], int] | None,
) -> Decision:
    if site.refusal:
        return _decision(site, config, Strategy.EXACT, site.refusal)
    rates = prices[site.device]
    if isinstance(rates, str):
        return _decision(site, config, Strategy.EXACT, rates)
    if site.conv is not None and not rates.convolution:
        return _decision(site, config, Strategy.EXACT, NO_CONVOLUTIONS)
    forced = config.overridden(site.name)
    if forced is not None:
        trusting = dataclasses.replace(config, lqs="off")
        strategy, reason = _feasible(site, trusting, (forced,))
        return _decision(site, config, strategy, reason or "chosen by override", rates, layer)
    if excluded := _excluded(site, config):
        return _decision(site, config, Strategy.EXACT, excluded, rates)
    tried = lqs.candidates(config, layer)
    strategy, reason = _feasible(site, config, tried, layer, _gx_bits(site, config, rates, layer))
    if strategy is Strategy.EXACT:
        return _decision(site, config, strategy, reason or "recipe 'exact'", rates)
    decision = _decision(site, config, strategy, reason, rates, layer)
    if site.conv is not None and strategy is Strategy.HLA8 and strategy != tried[-1]:
        decision = _without_gain(site, config, decision, tried, rates, layer)
        strategy = decision.strategy
    if decision.predicted_gain < config.min_gain:
        why = f"not worth it: {decision.way} predicted {decision.predicted_gain:.2f}x exact"
        why += _would_pay(site, decision, rates, config)
        return _decision(site, config, Strategy.EXACT, why, rates)
    above = _above(site, decision, config, room) if room else 0
    if above > 0:
        why = f"{decision.way} would take {above / 2**20:.0f} MiB above the step's exact peak"
        return _decision(site, config, Strategy.EXACT, why, rates)
    return decision


def _above(site: Site, d: Decision, config: HotConfig, room: Callable[[fx.Node], int]) -> int:
    """By how many bytes the step's peak would rise for what the layer makes on its way."""
    if not isinstance(site.nodes, SiteNodes):
        return 0
    made = layer_bytes(d.strategy, d.how(site.nodes), shape_of(site, config.rank))
    products = [n for n in (site.nodes.grad_input, site.nodes.grad_weight) if n is not None]
    return made - room(min(products)) if made > LEAST else 0


def _without_gain(
    site: Site,
    config: HotConfig,
    hla: Decision,
    tried: tuple[Strategy, ...],
    rates: Rates,
    layer: LayerProfile | None,
) -> Decision:
    """``hla`` of a convolution, or the next strategy where half the rows are predicted no faster.

    Unlike a Linear's rows, a kernel's are transformed anew for every offset.
    """
    cheaper = tried[tried.index(Strategy.HLA8) + 1 :]
    strategy, reason = _feasible(site, config, cheaper, layer, hla.gx_bits)
    why = "; ".join(filter(None, (f"no hla8: predicted no faster than {strategy}", reason)))
    other = _decision(site, config, strategy, why, rates, layer)
    return hla if hla.predicted_gain > other.predicted_gain else other


def _excluded(site: Site, config: HotConfig) -> str | None:
    """Why the user's globs or the paper's rules leave this layer alone."""
    if problem := _not_asked_for(site.name, config):
        return problem
    if "lora_" in site.name:
        return "low-rank factor: quantising it collapses accuracy (paper, table 3)"
    if site.head and site.conv is None and config.keep_head:
        return "classifier head: left alone, as in the paper"
    if site.conv is not None:
        alone = "first convolution (of the model's input): left alone, as in the paper"
        return alone if site.first else None
    small, large = sorted((hint(site.outputs), hint(site.inputs)))
    if small <= _LOW_RANK and large >= 8 * small:
        return "low-rank factor or head by shape: left alone, as in the paper"
    return None


def _not_asked_for(layer: str, config: HotConfig) -> str:
    """Why the user's globs leave this layer alone; '' if they do not."""
    if not any(fnmatchcase(layer, glob) for glob in config.include):
        return f"not in include={list(config.include)}"
    if any(fnmatchcase(layer, glob) for glob in config.exclude):
        return f"in exclude={list(config.exclude)}"
    return ""


def _feasible(
    site: Site,
    config: HotConfig,
    strategies: tuple[Strategy, ...],
    layer: LayerProfile | None = None,
    bits: int = 8,
) -> tuple[Strategy, str]:
    """The first strategy that this layer's facts and, if measured, its errors allow; and why."""
    if hint(site.rows) == 0:
        return Strategy.EXACT, "empty batch"
    reasons: list[str] = []
    keeps_own = BASELINES | {Strategy.EXACT}
    if not site.needs_grad_weight and not keeps_own & set(strategies):
        strategies = (Strategy.GX_ONLY,)
        reasons.append("frozen weight: no g_w, nothing saved")
    for strategy in strategies:
        problem = batch_problem(site) if grouped_by_sample(site, strategy, config) else None
        if site.conv is not None and not STRATEGIES[strategy].convolves:
            problem = "the baselines cover Linear layers only"
        problem = problem or lqs.over_budget(layer, config, strategy, bits)
        if problem is None:
            if layer is not None and strategy is not Strategy.EXACT:
                reasons.append(lqs.verdict(layer, config, strategy, bits))
            return strategy, "; ".join(filter(None, reasons))
        reasons.append(f"no {strategy}: {problem}")
    return Strategy.EXACT, "; ".join(reasons)


def _decision(
    site: Site,
    config: HotConfig,
    strategy: Strategy,
    reason: str,
    rates: Rates | None = None,
    layer: LayerProfile | None = None,
) -> Decision:
    """The decision with the numbers that follow from it."""
    gx_bits, spec = _gx_bits(site, config, rates, layer), STRATEGIES[strategy]
    unpriced = decided(site, config, strategy, reason, gx_bits, lqs.per_token(layer, config))
    once = gx_bits == 8 and config.per_channel and _reads_once(site, spec, unpriced.rank, rates)
    packs = unpriced.gx and gx_bits == 4 and _multiplies_int4(site, rates)
    packs = packs and strategy is not Strategy.EXACT and strategy not in BASELINES
    before = _bytes_of_x(site) if unpriced.gw else 0
    unpriced = dataclasses.replace(unpriced, one_read=once, packed=packs, bytes_before=before)
    if rates is None or strategy is Strategy.EXACT:
        return unpriced
    price = _price(site, unpriced, rates, config)
    exact, ours = price.times()
    return dataclasses.replace(
        unpriced, predicted_gain=round(price.gain(), 3), seconds_won=exact - ours
    )


def _price(site: Site, d: Decision, rates: Rates, config: HotConfig) -> Price:
    if site.conv is not None:
        return backward_price(site, d.strategy, rates, config.rows, config.rank)
    how = d.how(site.nodes if isinstance(site.nodes, SiteNodes) else None)
    return layer_price(d.strategy, how, rates, d.dtype, shape_of(site, config.rank))


def _bytes_of_x(site: Site) -> int:
    conv, sizes = site.conv, [site.rows, site.inputs]
    if conv is not None and not conv.transposed:
        sizes = [conv.batch, conv.big_channels, *conv.big_size]
    return math.prod(map(hint, sizes)) * site.dtype.itemsize


def _would_pay(site: Site, d: Decision, rates: Rates, config: HotConfig) -> str:
    """From which batch on a layer that is too small would be worth it."""
    price, least = _price(site, d, rates, config), config.min_gain
    if site.conv is not None:
        return f"; {would_pay(price, 'batch', least)}"
    rows, samples = price.pays_from(least), hint(site.lead[0])
    per_sample = hint(site.rows) // samples if site.batched and samples else 0
    batch = f" (a batch of {-(-rows // per_sample)})" if rows and per_sample else ""
    return f"; {would_pay(price, 'number of rows', least)}{batch}"


def shape_of(site: Site, rank: int) -> Shape:
    """The layer's numbers, symbolic sizes as traced."""
    return Shape(
        rows=hint(site.rows),
        outputs=hint(site.outputs),
        inputs=hint(site.inputs),
        element=site.dtype.itemsize,
        rank=rank,
    )


def _reads_once(site: Site, spec: Spec, rank: int, rates: Rates | None) -> bool:
    """One quantisation of g_y can serve both products, and does so faster on this device."""
    both = site.needs_grad_input and site.needs_grad_weight and site.conv is None
    both = both and isinstance(site.outputs, int)  # a size of the product's result
    return (
        both and spec.one_read and rank in ONE_READ_RANKS and rates is not None and rates.one_read
    )


def _gx_bits(site: Site, config: HotConfig, rates: Rates | None, layer: LayerProfile | None) -> int:
    """4 bits only where they buy speed: INT4 values carried as INT8 cost what INT8 costs."""
    return lqs.gx_bits(layer, config, 4 if _multiplies_int4(site, rates) else 8)


def _multiplies_int4(site: Site, rates: Rates | None) -> bool:
    """The device multiplies INT4 faster than INT8, and there is an operator that does: Linear's."""
    return site.conv is None and rates is not None and rates.int4 > rates.integer
