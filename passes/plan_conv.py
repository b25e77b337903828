"""What planning needs to know of convolutions: which to leave alone, and their numbers."""

from __future__ import annotations

import sympy

from hot_compile.config import Rows, Strategy
from hot_compile.passes.base.site import Convolution, Site, hint
from hot_compile.passes.cost.conv import (
    ConvShape,
    at,
    batch_that_pays,
    conv_times,
    shape_of,
)
from hot_compile.passes.cost.linear import Rates, Shape


def conv_excluded(site: Site) -> str | None:
    """Why this convolution is left alone whatever it costs; an override may still take it."""
    if site.first:
        return "first convolution (of the model's input): left alone, as in the paper"
    return None


def conv_seconds(
    site: Site, strategy: Strategy, rates: Rates, linear: Shape, rows: Rows
) -> tuple[float, float]:
    """Predicted seconds of exact and of ``strategy``."""
    assert site.conv is not None
    im2col, shape = _unfolded(site.conv, strategy, rows), _shape(site.conv, linear)
    exact, ours = (at(time, shape) for time in _times(site, strategy, rates, im2col))
    return exact, ours


def conv_would_pay(
    site: Site, strategy: Strategy, rates: Rates, linear: Shape, rows: Rows, least: float
) -> str:
    """From which batch on ``strategy`` would be worth it, for people."""
    assert site.conv is not None
    times = _times(site, strategy, rates, _unfolded(site.conv, strategy, rows))
    batch = batch_that_pays(times, _shape(site.conv, linear), hint(site.conv.batch), least)
    return (
        "no batch would change that"
        if batch is None
        else f"it would pay from a batch of {batch} on"
    )


def _times(
    site: Site, strategy: Strategy, rates: Rates, im2col: bool
) -> tuple[sympy.Expr, sympy.Expr]:
    assert site.conv is not None
    dtype, gx, gw = str(site.dtype), site.needs_grad_input, site.needs_grad_weight
    return conv_times(strategy, gx, gw, rates, dtype.removeprefix("torch."), site.conv, im2col)


def _unfolded(conv: Convolution, strategy: Strategy, rows: Rows) -> bool:
    return rows is Rows.CONSECUTIVE and strategy is Strategy.HLA8 and not conv.is_product


def _shape(conv: Convolution, linear: Shape) -> ConvShape:
    return shape_of(conv, linear.rows, linear.outputs, linear.inputs, linear.element, linear.rank)
