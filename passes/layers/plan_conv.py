"""What planning needs to know of convolutions: which to leave alone, and their numbers."""

from __future__ import annotations

from hot_compile.config import Rows, Strategy
from hot_compile.passes.cost.conv import ConvShape, at, conv_gain, conv_saved_bytes, shape_of
from hot_compile.passes.cost.linear import Rates, Shape
from hot_compile.passes.site import Site


def conv_excluded(site: Site) -> str | None:
    """Why this convolution is left alone whatever it costs; an override may still take it."""
    if site.first:
        return "first convolution (of the model's input): left alone, as in the paper"
    return None


def conv_numbers(
    site: Site, strategy: Strategy, rates: Rates | None, linear: Shape, rows: Rows
) -> tuple[float, int, int]:
    """(predicted gain, bytes of x as exact saves it, as ``strategy`` does); gain 1 unpriced."""
    assert site.conv is not None
    im2col = rows is Rows.CONSECUTIVE and strategy is Strategy.HLA8 and not site.conv.is_product
    shape: ConvShape = shape_of(
        site.conv, linear.rows, linear.outputs, linear.inputs, linear.element, linear.rank
    )
    gain = 1.0
    if rates is not None:
        dtype = str(site.dtype).removeprefix("torch.")
        gain = conv_gain(
            strategy,
            site.needs_grad_input,
            site.needs_grad_weight,
            rates,
            dtype,
            site.conv,
            shape,
            im2col,
        )
    before, after = (
        int(at(conv_saved_bytes(s, site.conv, im2col and s is strategy), shape))
        for s in (Strategy.EXACT, strategy)
    )
    return gain, before, after
