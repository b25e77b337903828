"""(heads, config) -> what happens to each: a pure function. All choosing about heads is here."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import torch

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.cost.linear import Pricing
from hot_compile.passes.head.find import Head, Refused
from hot_compile.passes.head.operands import NotUnderstood, shape_of
from hot_compile.passes.head.quantised import EXACT, By, by, problem
from hot_compile.runtime.head.products import chunk_rows

OFF, FORWARD, BACKWARD = "off", "gradients in the forward", "logits twice"
LAYERS_BY_OVERRIDE = "its products are a layer's by override: "
"""How a head's reason begins if ``override`` gave it a strategy that needs all rows at once."""


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
    by: By = EXACT
    """How its gradients' products are computed: exactly, unless ``override`` says otherwise."""

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
    def strategy(self) -> Strategy:
        """By which its gradients' products are computed."""
        return Strategy(self.by[0])


def plan_head(found: Head | Refused, config: HotConfig, pricing: Pricing) -> HeadDecision:
    """Choose for one head whether and how it goes in chunks."""
    strategy = config.overridden(found.name) or Strategy.EXACT
    way, reason = _choice(found, config, strategy, pricing)
    rows, outputs = found.value.shape
    x = found.product.args[0 if len(found.product.args) == 2 else 1]
    inputs, itemsize = shape_of(x)[1], found.value.dtype.itemsize
    return HeadDecision(
        name=found.name,
        shape=(str(rows), str(outputs), str(inputs)),
        dtype=str(found.value.dtype).removeprefix("torch."),
        way=way,
        reason=reason,
        logits_bytes=bytes_of(found.value),
        chunk_bytes=_chunk_bytes(found, hint(rows), hint(outputs), hint(inputs), itemsize),
        returned=not isinstance(found, Refused) and bool(found.returned),
        by=by(strategy, config),
    )


def _choice(
    found: Head | Refused, config: HotConfig, strategy: Strategy, pricing: Pricing
) -> tuple[str, str]:
    if config.head == "off":
        return OFF, "head='off'"
    if not config.keep_head:
        return OFF, "keep_head=False: the head's products are a layer's as any other"
    forced = strategy is not Strategy.EXACT
    if not forced and any(fnmatchcase(found.name, glob) for glob in config.exclude):
        return OFF, f"in exclude={list(config.exclude)}"
    if isinstance(found, Refused):
        return OFF, found.reason
    if not all(isinstance(n, int) for n in found.value.shape[1:]):
        return OFF, "a vocabulary of symbolic size"
    if forced and found.softmax is None:
        return OFF, f"{LAYERS_BY_OVERRIDE}{strategy} works on the gradient of a softmax only"
    if forced and (unfit := _unfit(found, config, strategy, pricing)):
        return OFF, f"{LAYERS_BY_OVERRIDE}{unfit}"
    own = f"; its gradients' products are {strategy} by override" if forced else ""
    way, reason = _way(found, forced)
    return way, reason + own


def _unfit(found: Head, config: HotConfig, strategy: Strategy, pricing: Pricing) -> str | None:
    """Why the strategy cannot work on chunks of this head."""
    rates = pricing(found.value.device)
    return rates if isinstance(rates, str) else problem(strategy, config)


def _way(found: Head, forced: bool) -> tuple[str, str]:
    try:
        tangent = found.chunks.tangent()
    except NotUnderstood as why:
        return BACKWARD, str(why)
    if tangent is None:
        return FORWARD, "no gradient of it is asked for"
    if found.value.dtype is torch.float16:
        return BACKWARD, "gradients in fp16 underflow before the loss's scale is known"
    if forced and found.softmax is not None and found.softmax.needs_statistics():
        return BACKWARD, "the gradient's size depends on the logits"
    return FORWARD, "the loss's gradient is one number"


def _chunk_bytes(found: Head | Refused, rows: int, outputs: int, inputs: int, itemsize: int) -> int:
    readers = found.chunks.at.readers.values() if isinstance(found, Head) else ()
    wanted = any(reader.kind == "total" for reader in readers)
    return chunk_rows(rows, outputs, inputs, itemsize, wanted) * outputs * itemsize
