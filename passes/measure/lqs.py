"""Layer-wise strategy selection: (layer's profile, error budget) -> which strategies it may get.

The paper's LQS chooses g_y's granule, per token or per tensor. With scales per row and column,
which cost nothing, what is worth choosing is the whole strategy: the cheapest whose measured
gradients stay within the recipe's error budget. Everything here is a pure function of the profile.
"""

from __future__ import annotations

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.measure.profile import LayerProfile, Measure, config_variant, gx_variant

_HALVED = 0.5
"""The paper's rule: per token if that cuts g_y's L2 quantisation error by more than half."""


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
