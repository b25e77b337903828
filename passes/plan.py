"""(Sites, config, device) -> Plan: a pure function. All choosing happens here and nowhere else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from hot_compile.config import BASELINES, HotConfig, Rows, Strategy
from hot_compile.errors import PlanFormatError
from hot_compile.passes import lqs
from hot_compile.passes.cost import Rates, Shape, at, predicted_gain, saved_bytes
from hot_compile.passes.head.plan import HeadDecision
from hot_compile.passes.plan_conv import conv_excluded, conv_numbers
from hot_compile.passes.profile import LayerProfile, Profile
from hot_compile.passes.site import Site, hint
from hot_compile.runtime.ops import SHARED_RANKS

PLAN_VERSION = 2
_MIN_SAMPLES = 16
_LOW_RANK = 64


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
    bytes_after: int
    """x as this strategy stores it, where it has to be stored at all."""
    tiles: bool = False
    """HLA's 16 rows are a tile of a convolution's positions, not consecutive ones."""
    shared: bool = False
    """g_y is quantised once, to 8 bits, for both products (docs/adr/0005)."""
    packed: bool = False
    """g_x's operands are packed two values a byte, for INT4 tensor cores (docs/adr/0008)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every Site's decision. Frozen, hashable, printable, JSON both ways."""

    recipe: str
    decisions: tuple[Decision, ...]
    heads: tuple[HeadDecision, ...] = ()
    """Products whose results only feed a loss, which go in chunks together with it."""

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
    def choice(self) -> tuple[tuple[object, ...], ...]:
        """What was chosen, without the reasons: equal where the code comes out the same."""
        layers = tuple((d.site, d.strategy, d.gx_bits, d.per_token) for d in self.decisions)
        return layers + tuple((h.name, h.way) for h in self.heads)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_json` is its inverse."""
        decisions = [
            {**dataclasses.asdict(d), "shape": list(d.shape), "strategy": d.strategy.value}
            for d in self.decisions
        ]
        heads = [{**dataclasses.asdict(h), "shape": list(h.shape)} for h in self.heads]
        return {
            "version": PLAN_VERSION,
            "recipe": self.recipe,
            "decisions": decisions,
            "heads": heads,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            PlanFormatError: another version, or fields missing or unknown.
        """
        if data.get("version") != PLAN_VERSION:
            raise PlanFormatError(
                f"got a plan of version {data.get('version')!r}; this hot-compile reads version "
                f"{PLAN_VERSION}. Make it again with hot_compile.explain(...)."
            )
        try:
            decisions = tuple(
                Decision(**{**d, "shape": tuple(d["shape"]), "strategy": Strategy(d["strategy"])})
                for d in data["decisions"]
            )
            heads = tuple(
                HeadDecision(**{**h, "shape": tuple(h["shape"])}) for h in data.get("heads", ())
            )
            return cls(recipe=data["recipe"], decisions=decisions, heads=heads)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFormatError(
                f"got a plan whose entries do not fit ({error}); expected what Plan.to_json wrote."
            ) from error

    def stable_hash(self) -> str:
        """Hex digest, the same in every process."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


Pricing = Callable[[torch.device], "Rates | str"]
"""Rates of a device, or the reason why nothing can run there."""


def plan(
    sites: Sequence[Site], config: HotConfig, pricing: Pricing, profile: Profile | None = None
) -> Plan:
    """Choose a strategy for every Site.

    Args:
        sites: what ``match`` found.
        config: the user's recipe and options.
        pricing: gives a device's rates, or says why the runtime is missing there.
        profile: what calibration measured of this model, if it did.

    Raises:
        ProfileMismatchError: the profile is of another model.
    """
    if profile is not None and config.lqs == "off":  # what was observed may lack idle layers
        profile.check(sites, config.rank)
    layers = profile.layers if profile is not None else {}

    def priced(device: torch.device) -> Rates | str:
        rates = pricing(device)
        return rates if isinstance(rates, str) else rates.override(dict(config.rates))

    decisions = (_decide(site, config, priced, layers.get(site.name)) for site in sites)
    return Plan(config.recipe, tuple(decisions))


def _decide(
    site: Site, config: HotConfig, pricing: Pricing, layer: LayerProfile | None
) -> Decision:
    if site.refusal:
        return _decision(site, config, Strategy.EXACT, site.refusal)
    rates = pricing(site.device)
    if isinstance(rates, str):
        return _decision(site, config, Strategy.EXACT, rates)
    if site.conv is not None and not rates.convolution:
        return _decision(site, config, Strategy.EXACT, "no convolutions on this device yet")
    forced = _override(site.name, config)
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
        why = f"not worth it: {strategy} predicted {decision.predicted_gain:.2f}x exact"
        return _decision(site, config, Strategy.EXACT, why, rates)
    return decision


def forced(site: Site, config: HotConfig, strategy: Strategy) -> Decision:
    """The Decision that gives the layer ``strategy`` whatever speaks against it: for measuring."""
    return _decision(site, config, strategy, "")


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


def _override(name: str, config: HotConfig) -> Strategy | None:
    chosen = [strategy for glob, strategy in config.override if fnmatchcase(name, glob)]
    return chosen[-1] if chosen else None


def _excluded(site: Site, config: HotConfig) -> str | None:
    """Why the user's globs or the paper's rules leave this layer alone."""
    if not any(fnmatchcase(site.name, glob) for glob in config.include):
        return f"not in include={list(config.include)}"
    if any(fnmatchcase(site.name, glob) for glob in config.exclude):
        return f"in exclude={list(config.exclude)}"
    if "lora_" in site.name:
        return "low-rank factor: quantising it collapses accuracy (paper, table 3)"
    if site.head and config.keep_head:
        return "classifier head: left alone, as in the paper"
    if site.conv is not None:
        return conv_excluded(site)
    small, large = sorted((hint(site.outputs), hint(site.inputs)))
    if small <= _LOW_RANK and large >= 8 * small:
        return "low-rank factor or head by shape: left alone, as in the paper"
    return None


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
        problem = batch_problem(site) if _wants_batch(site, strategy, config) else None
        if site.conv is not None and strategy in BASELINES:
            problem = "the baselines cover Linear layers only"
        problem = problem or lqs.over_budget(layer, config, strategy, bits)
        if problem is None:
            if layer is not None and strategy is not Strategy.EXACT:
                reasons.append(lqs.verdict(layer, config, strategy, bits))
            return strategy, "; ".join(filter(None, reasons))
        reasons.append(f"no {strategy}: {problem}")
    return Strategy.EXACT, "; ".join(reasons)


def _wants_batch(site: Site, strategy: Strategy, config: HotConfig) -> bool:
    """``hla8`` groups rows across the batch; a convolution's by spatial tiles instead."""
    return strategy is Strategy.HLA8 and config.rows is Rows.BATCH and site.conv is None


def batch_problem(site: Site) -> str | None:
    """Why rows cannot be grouped across the batch, or None."""
    if not site.batched:
        return "its first dimension is not the batch"
    if hint(site.lead[0]) < _MIN_SAMPLES:
        return f"batch of {hint(site.lead[0])}, grouping wants {_MIN_SAMPLES}"
    if not all(isinstance(size, int) for size in site.lead[1:]):
        return "tokens per sample are symbolic"
    return None


def _decision(
    site: Site,
    config: HotConfig,
    strategy: Strategy,
    reason: str,
    rates: Rates | None = None,
    layer: LayerProfile | None = None,
) -> Decision:
    """Fill in the numbers that follow from the choice."""
    gx, gw = site.needs_grad_input, site.needs_grad_weight
    hla = strategy is Strategy.HLA8
    shape = Shape(
        rows=hint(site.rows),
        outputs=hint(site.outputs),
        inputs=hint(site.inputs),
        element=site.dtype.itemsize,
        rank=config.rank,
    )
    dtype = str(site.dtype).removeprefix("torch.")
    gain, gx_bits = 1.0, _gx_bits(site, config, rates, layer)
    rank = config.rank if hla or strategy is Strategy.LBP_WHT else 0
    shared = gx_bits == 8 and config.per_channel and _shares(site, strategy, rank, rates)
    packed = gx and gx_bits == 4 and _multiplies_int4(site, rates)
    if site.conv is not None:
        priced = None if strategy is Strategy.EXACT else rates
        gain, before, after = conv_numbers(site, strategy, priced, shape, config.rows)
    else:
        if strategy is not Strategy.EXACT and rates is not None:
            gain = predicted_gain(strategy, gx, gw, rates, dtype, shape, shared, packed)
        before, after = int(at(saved_bytes(Strategy.EXACT), shape)), _saved(strategy, shape)
    return Decision(
        site=site.name,
        shape=(str(site.rows), str(site.outputs), str(site.inputs)),
        dtype=dtype,
        strategy=strategy,
        reason=reason,
        gx=gx,
        gw=gw,
        gx_bits=gx_bits,
        per_channel=config.per_channel,
        per_token=lqs.per_token(layer, config),
        rank=rank,
        tokens=math.prod(map(int, site.lead[1:])) if _wants_batch(site, strategy, config) else 1,
        predicted_gain=round(gain, 3),
        bytes_before=before if gw else 0,
        bytes_after=after if gw else 0,
        tiles=hla and site.conv is not None and config.rows is Rows.BATCH,
        shared=shared,
        packed=packed and strategy is not Strategy.EXACT and strategy not in BASELINES,
    )


def _shares(site: Site, strategy: Strategy, rank: int, rates: Rates | None) -> bool:
    """One quantisation of g_y can serve both products, and does so faster on this device."""
    both = site.needs_grad_input and site.needs_grad_weight and site.conv is None
    stored = strategy in (Strategy.HLA8, Strategy.INT4, Strategy.INT8)
    return both and stored and rank in SHARED_RANKS and rates is not None and rates.one_read


def _gx_bits(site: Site, config: HotConfig, rates: Rates | None, layer: LayerProfile | None) -> int:
    """4 bits only where they buy speed: INT4 values carried as INT8 cost what INT8 costs."""
    return lqs.gx_bits(layer, config, 4 if _multiplies_int4(site, rates) else 8)


def _multiplies_int4(site: Site, rates: Rates | None) -> bool:
    """The device multiplies INT4 faster than INT8, and there is an operator that does: Linear's."""
    return site.conv is None and rates is not None and rates.int4 > rates.integer


def _saved(strategy: Strategy, shape: Shape) -> int:
    kept = Strategy.EXACT if strategy is Strategy.GX_ONLY else strategy
    return int(at(saved_bytes(kept), shape))
