"""Layer-wise strategy selection: (layer's profile, error budget) -> which strategies it may get.

The paper's LQS chooses g_y's granule, per token or per tensor. With scales per row and column,
which cost nothing, what is worth choosing is the whole strategy: the cheapest whose measured
gradients stay within the recipe's error budget. Everything here is a pure function of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hot_compile.config import UNCOMPRESSED, HotConfig, Strategy
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile.profile import (
    LayerProfile,
    Measure,
    Profile,
    StorageMeasure,
    config_variant,
    gx_variant,
)

_HALVED = 0.5
"""The paper's rule: per token if that cuts g_y's L2 quantisation error by more than half."""

_STORING = 0.5**0.5
"""Share of the budget that storing one tensor may take of a parameter's gradient: as independent
errors add up, that leaves the layer's product as much."""
_PASSED_ON = 1 / 3
"""The same of a gradient that other layers get: what is lost there is lost for all of them."""


def storable(
    schemes: Sequence[Scheme], found: Mapping[str, StorageMeasure], config: HotConfig
) -> tuple[Scheme, ...]:
    """Those of ``schemes`` whose measured errors stay within the budget, and ``exact``."""
    budget = config.error_budget
    return tuple(s for s in schemes if s is Scheme.EXACT or stays_within(found.get(s), budget))


def stays_within(measure: StorageMeasure | None, budget: float | None) -> bool:
    """What storing a tensor loses is within its share of a budget; nothing known is not."""
    if budget is None or measure is None:
        return False
    return measure.error <= _STORING * budget and measure.passed <= _PASSED_ON * budget


def storage_choice(profile: Profile | None, config: HotConfig) -> dict[str, tuple[Scheme, ...]]:
    """By tensor of the profile: what it may be stored as; equal where the same code comes of it."""
    known = profile.storage if profile else {}
    return {name: storable(list(map(Scheme, m)), m, config) for name, m in known.items()}


def storage_verdict(scheme: Scheme, found: Mapping[str, StorageMeasure], config: HotConfig) -> str:
    """The measured errors behind a tensor's scheme, and why it is not the next coarser one."""
    texts = [f"error {errors_of(found[scheme])}"] if scheme in found else []
    bits, budget = scheme.spec.bits or UNCOMPRESSED, config.error_budget
    over = [s for s in map(Scheme, found) if not stays_within(found[s], budget)]
    coarser = [s for s in over if s.spec.bits < bits]
    if coarser:
        finest = max(coarser, key=lambda s: s.spec.bits)
        texts.append(f"no {finest}: {errors_of(found[finest])} over budget")
    return "LQS: " + ", ".join(texts) if texts else ""


def errors_of(measure: StorageMeasure) -> str:
    """In words: a parameter's error, and that of what is passed on."""
    passed = f" ({measure.passed:.2g} passed on)" if measure.passed else ""
    return f"{measure.error:.2g}{passed}"


def candidates(config: HotConfig, layer: LayerProfile | None) -> tuple[Strategy, ...]:
    """The recipe's strategies, cheapest first, and then INT8 for layers that none of them suits."""
    chosen = config.strategies
    judged = config.error_budget is not None and (layer is not None or config.lqs == "auto")
    if not judged or Strategy.EXACT in chosen or Strategy.INT8 in chosen:
        return chosen
    return (*chosen, Strategy.INT8)


def per_token(layer: LayerProfile | None, config: HotConfig) -> bool:
    """The paper's rule for g_y's scales, in recipes that have them per tensor."""
    if config.per_channel:
        return False
    if config.per_token is not None or layer is None:
        return bool(config.per_token)
    if layer.token_error is None or layer.tensor_error is None:
        return False
    return layer.token_error < _HALVED * layer.tensor_error


def gx_bits(layer: LayerProfile | None, config: HotConfig, cheapest: int) -> int:
    """Bits of g_x: as configured, or the fewest that pay and stay within the budget."""
    if config.gx_bits is not None or layer is None or config.error_budget is None:
        return config.gx_bits or cheapest
    measured = layer.grad_input.get(gx_variant(cheapest, config.per_channel))
    return 8 if measured is not None and measured.error > config.error_budget else cheapest


def over_budget(
    layer: LayerProfile | None, config: HotConfig, strategy: Strategy, bits: int
) -> str | None:
    """Why ``strategy`` with ``bits`` of g_x leaves the error budget; None if it does not.

    HLA, which drops half of what g_w sums up, is not taken on trust where measuring is under way.
    """
    if config.error_budget is None:
        return None
    if layer is None:
        waits = strategy is Strategy.HLA8 and config.lqs == "auto"
        return "not measured yet" if waits else None
    problems = [
        f"{side} error {measure.error:.2g}"
        for side, measure in _measures(layer, config, strategy, bits)
        if measure.error > config.error_budget
    ]
    return f"{', '.join(problems)} over budget {config.error_budget:g}" if problems else None


def verdict(layer: LayerProfile, config: HotConfig, strategy: Strategy, bits: int) -> str:
    """The measured errors behind a choice, for the decision's reason."""
    if config.error_budget is None:
        if layer.token_error is None or config.per_channel:
            return ""
        scales = "per token" if per_token(layer, config) else "per tensor"
        return f"LQS: {scales} (error {layer.token_error:.2g} against {layer.tensor_error:.2g})"
    found = _measures(layer, config, strategy, bits)
    return "LQS: " + ", ".join(f"{side} error {m.error:.2g}" for side, m in found) if found else ""


def _measures(
    layer: LayerProfile, config: HotConfig, strategy: Strategy, bits: int
) -> list[tuple[str, Measure]]:
    """What was measured of this strategy; a variant that was not measured is not judged."""
    found = [
        ("g_w", layer.grad_weight.get(config_variant(strategy, config))),
        ("g_x", layer.grad_input.get(gx_variant(bits, config.per_channel))),
    ]
    return [(side, measure) for side, measure in found if measure is not None]
