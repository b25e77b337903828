"""(heads, config) -> what happens to each: a pure function. All choosing about heads is here."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import torch

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.graph import strip
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.cost.linear import Pricing, Rates, Shape, layer_price
from hot_compile.passes.head.find import Head, Refused
from hot_compile.passes.head.operands import NotUnderstood, shape_of
from hot_compile.passes.layers.strategies import How
from hot_compile.runtime.head.products import chunk_rows

OFF, FORWARD, BACKWARD = "off", "gradients in the forward", "logits twice"
LAYERS_BY_OVERRIDE = "its products are a layer's by override: "
"""How a head's reason begins if ``override`` gave it a strategy that does not work on chunks."""

LEAST = 2**25
"""Bytes that are not worth a reason."""
_BESIDE = 12
"""Bytes a logit that integers move besides what a layer's products do, for what stands at the
labels and for sums of chunks: on an H200 9 at widths of 2048 and 4096, and exact chunks of such
heads have become larger, so faster, since."""


@dataclasses.dataclass(frozen=True)
class HeadDecision:
    """What happens to one head and its loss, and why."""

    name: str
    shape: tuple[str, str, str]
    """L, O, I as text; symbolic sizes keep their symbol."""
    dtype: str
    way: str
    """"off"; "gradients in the forward": three products, g_x and g_w wait for the backward;
    "logits twice": four, nothing waits."""
    reason: str
    logits_bytes: int
    """The logits as the exact graph makes them; their gradient takes as much again."""
    chunk_bytes: int
    """What exists of either at a time."""
    returned: bool
    """The caller gets the logits, so they are written once for that."""
    strategy: Strategy = Strategy.EXACT
    """How its gradients' products are computed."""

    @property
    def chunked(self) -> bool:
        """The graph changes."""
        return self.way != OFF

    @property
    def bytes_left_out(self) -> int:
        """Bytes that never exist: the logits, unless the caller gets them, and their gradient."""
        if not self.chunked:
            return 0
        return (1 if self.returned else 2) * self.logits_bytes - self.chunk_bytes

    @property
    def int8(self) -> bool:
        """Both products of the logits' gradient are on integers."""
        return self.chunked and self.strategy is Strategy.INT8


def plan_head(found: Head | Refused, config: HotConfig, pricing: Pricing) -> HeadDecision:
    """Choose for one head whether and how it goes in chunks."""
    way, strategy, reason = _choice(found, config, pricing)
    rows, outputs = found.value.shape
    inputs, itemsize = shape_of(found.product.args[-2])[1], found.value.dtype.itemsize
    return HeadDecision(
        name=found.name,
        shape=(str(rows), str(outputs), str(inputs)),
        dtype=str(found.value.dtype).removeprefix("torch."),
        way=way,
        reason=reason,
        logits_bytes=bytes_of(found.value),
        chunk_bytes=_chunk_bytes(found, hint(rows), hint(outputs), hint(inputs), itemsize),
        returned=not isinstance(found, Refused) and bool(found.returned),
        strategy=strategy,
    )


def _choice(
    found: Head | Refused, config: HotConfig, pricing: Pricing
) -> tuple[str, Strategy, str]:
    """(way, strategy of the gradients' products, why)."""
    asked = config.overridden(found.name)
    forced = asked not in (None, Strategy.EXACT)
    wanted = asked or (Strategy.INT8 if config.head == "int8" else Strategy.EXACT)
    off = _left_out(found, config, forced)
    if off or isinstance(found, Refused):
        return OFF, asked or Strategy.EXACT, off
    unfit: str | None = ""
    if wanted is not Strategy.EXACT:
        unfit = _unfit(found, wanted, pricing) or (
            "" if forced else _loss(found, config, pricing) or _above(found)
        )
        if unfit and forced:
            return OFF, wanted, LAYERS_BY_OVERRIDE + unfit
        if not unfit:
            way, reason = _way(found, True)
            own = f"its gradients' products are {wanted}{' by override' if forced else ''}"
            return way, wanted, f"{reason}; {own}"
        unfit = f"; its gradients' products stay exact: {unfit}"
    way, reason = _way(found, False)
    if (why := _pointless(found, config)) is not None:
        way, reason = OFF, why
    return way, Strategy.EXACT, f"{reason}{unfit}"


def _left_out(found: Head | Refused, config: HotConfig, forced: bool) -> str:
    """Why the head stays as it is, if anything says so."""
    if config.head == "off":
        return "head='off'"
    if not config.keep_head:
        return "keep_head=False: the head's products are a layer's as any other"
    if not forced and any(fnmatchcase(found.name, glob) for glob in config.exclude):
        return f"in exclude={list(config.exclude)}"
    if isinstance(found, Refused):
        return found.reason
    if not all(isinstance(n, int) for n in found.value.shape[1:]):
        return "a vocabulary of symbolic size"
    return ""


def _pointless(found: Head, config: HotConfig) -> str | None:
    """Why chunks do not save enough of what the whole head holds at its highest, if so.

    Whole, a weight's gradient lies beside the logits', which take their place; of a weight that
    autocast casts it is cast later. Chunks add up a gradient in fp32. Beside it lies a chunk; later
    what is made of it in 16 bits, of a weight that has as many.
    """
    if not _adds_up(found):
        return None
    (rows, outputs), inputs = map(hint, found.value.shape), shape_of(found.product.args[-2])[1]
    itemsize, numel = found.value.dtype.itemsize, outputs * hint(inputs)
    chunk = _chunk_bytes(found, rows, outputs, hint(inputs), itemsize)
    whole = (rows * outputs + numel) * itemsize
    if found.softmax is None and not found.chunks.is_softmax() and 2 * (4 * numel + chunk) > whole:
        return "the loss makes no more than the logits, of which chunks would save less than half"
    if itemsize != 2:
        return None
    weight = strip(found.product.args[-1], VIEWS)  # type: ignore[arg-type]
    cast = weight.target in CASTS
    most = max(whole, 6 * numel) if cast else whole
    ours = 4 * numel + (chunk if cast else max(chunk, 2 * numel))
    if max(most - ours, 0) < config.head_min_bytes:
        return "what chunks of it add up in fp32 takes as much as its logits"
    return None


def _unfit(found: Head, strategy: Strategy, pricing: Pricing) -> str | None:
    """Why the strategy cannot work on chunks of this head."""
    if found.softmax is None:
        return f"{strategy} works on the gradient of a softmax only"
    if strategy is not Strategy.INT8:
        return f"{strategy} is no strategy of chunks of rows"
    rates = pricing(found.value.device)
    return rates if isinstance(rates, str) else None


def _loss(found: Head, config: HotConfig, pricing: Pricing) -> str:
    """Why integers would be no faster than exact products, if so."""
    if found.softmax is not None and found.softmax.needs_statistics():
        return "the gradient's size depends on the logits, which would be multiplied out twice"
    rates, value = pricing(found.value.device), found.value
    assert isinstance(rates, Rates)
    inputs = shape_of(found.product.args[-2])[1]
    rows, outputs = value.shape
    shape = Shape(hint(rows), hint(outputs), hint(inputs), value.dtype.itemsize)
    dtype, rates = str(value.dtype).removeprefix("torch."), rates.override(dict(config.rates))
    price = layer_price(Strategy.INT8, How(), rates, dtype, shape)
    gain = price.gain(beside=_BESIDE * shape.rows * shape.outputs / rates.transform)
    return "" if gain >= config.min_gain else f"not worth it: int8 predicted {gain:.2f}x exact"


def _above(found: Head) -> str:
    """Why integers would take more memory than the whole head, if so.

    Besides the sum in fp32, W and x in 8 bits, and two forms of a chunk's gradient beside it.
    """
    (rows, outputs), inputs = (
        map(hint, found.value.shape),
        hint(shape_of(found.product.args[-2])[1]),
    )
    itemsize, weight = found.value.dtype.itemsize, outputs * inputs
    chunk = _chunk_bytes(found, rows, outputs, inputs, itemsize)
    ours = (5 if _adds_up(found) else 1) * weight + rows * inputs + chunk + 2 * chunk // itemsize
    above = ours - bytes_of(found.value) - weight * itemsize
    return f"int8 takes {above / 2**20:.0f} MiB more than the whole head" if above > LEAST else ""


def _way(found: Head, integers: bool) -> tuple[str, str]:
    try:
        tangent = found.chunks.tangent()
    except NotUnderstood as why:
        return BACKWARD, str(why)
    if tangent is None:
        return FORWARD, "no gradient of it is asked for"
    if found.value.dtype is torch.float16:
        return BACKWARD, "gradients in fp16 underflow before the loss's scale is known"
    if integers and found.softmax is not None and found.softmax.needs_statistics():
        return BACKWARD, "the gradient's size depends on the logits"
    return FORWARD, "the loss's gradient is one number"


def _chunk_bytes(found: Head | Refused, rows: int, outputs: int, inputs: int, itemsize: int) -> int:
    wanted = isinstance(found, Head) and _adds_up(found)
    own = outputs if isinstance(found, Refused) or found.softmax else found.chunks.columns
    return chunk_rows(rows, own, itemsize, wanted * outputs * inputs) * own * itemsize


def _adds_up(found: Head) -> bool:
    """Its weight's gradient is asked for."""
    return any(reader.kind == "total" for reader in found.chunks.at.readers.values())
