"""What options ask for and cannot have: told once, as warnings, since nothing fails by it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from hot_compile.config import HotConfig, Strategy
from hot_compile.errors import OptionError, OptionWarning
from hot_compile.passes.base.site import Site
from hot_compile.passes.head.plan import LAYERS_BY_OVERRIDE, HeadDecision
from hot_compile.passes.plan import Plan
from hot_compile.passes.storage.choose import Asked, plan_storage
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.fit_budget import Allowance, BudgetReport
from hot_compile.passes.storage.offers import TRUSTED_BITS
from hot_compile.passes.storage.record import Crossing
from hot_compile.sizes import memory_text

_LISTED = 6
"""A warning names this many layers."""
LESS = (
    "Ask for no less, train with smaller batches, or allow more to be stored: memory='all', "
    "memory_bits=4, a profile."
)
"""What helps where a budget is too small."""


def tell(texts: Iterable[str]) -> None:
    """Warn of each text, once a process."""
    for text in texts:
        warn_once(text)


@cache
def warn_once(text: str) -> None:
    """Warn; Python's own record of what it showed is lost in torch's ``catch_warnings``."""
    warnings.warn(text, OptionWarning, stacklevel=3)


def idle_globs(
    sites: Sequence[Site], config: HotConfig, heads: Sequence[HeadDecision] = ()
) -> Iterator[str]:
    """Globs of include, exclude and override that match no layer of this graph.

    ``heads``: those that go in chunks are no ``sites`` any more.
    """
    overridden = tuple(glob for glob, _ in config.override)
    options = {"include": config.include, "exclude": config.exclude, "override": overridden}
    names = [site.name for site in sites] + [head.name for head in heads if head.chunked]
    for option, globs in options.items():
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                yield (
                    f"got {option} with {glob!r}, which matches no layer of this graph; it has "
                    f"{_some(names)}. Correct the glob, unless another graph of the model has it."
                )


def idle_overrides(sites: Sequence[Site], config: HotConfig, plan: Plan) -> Iterator[str]:
    """Overrides whose layers stay exact, with the reason.

    What is no layer (a product of activations) counts only where it is named in full.
    """
    found: dict[tuple[str, Strategy, str], list[str]] = {}
    for site, decision in zip(sites, plan, strict=True):
        matching = [pair for pair in config.override if fnmatchcase(site.name, pair[0])]
        if not matching or decision.strategy is not Strategy.EXACT:
            continue
        glob, strategy = matching[-1]
        if strategy is not Strategy.EXACT and (site.refusal is None or glob == site.name):
            found.setdefault((glob, strategy, decision.reason), []).append(site.name)
    for (glob, strategy, reason), names in found.items():
        yield (
            f"override {{{glob!r}: '{strategy}'}} cannot be followed for {_some(names)}: {reason}. "
            "Left exact; choose another strategy there."
        )


def idle_forward(sites: Sequence[Site], plan: Plan) -> Iterator[str]:
    """An 8-bit forward that no layer of a graph can have, although there are some."""
    pairs = zip(sites, plan.forwards)  # noqa: B905  (no forwards where all stay exact)
    layers = [forward for site, forward in pairs if site.refusal is None]
    if layers and not any(forward.int8 for forward in layers):
        reasons = dict.fromkeys(forward.reason for forward in layers)
        yield (
            f"forward='int8' changes nothing in a graph of {_some([f.site for f in layers])}: "
            f"{'; '.join(list(reasons)[:_LISTED])}. Its forward stays exact; min_gain=0 takes what "
            "does not pay."
        )


def unfit_heads(heads: Sequence[HeadDecision]) -> Iterator[str]:
    """Heads that an override's strategy keeps from going in chunks, with the reason."""
    for head in heads:
        if head.reason.startswith(LAYERS_BY_OVERRIDE):
            yield (
                f"override gives the head {head.name!r} the strategy '{head.strategy}', which "
                f"keeps its logits ({head.logits_bytes} bytes, their gradient as many) whole: "
                f"{head.reason.removeprefix(LAYERS_BY_OVERRIDE)}. Choose 'int8' there to have both."
            )


def unmet_budget(
    found: Sequence[Crosser],
    chosen: Mapping[Crosser, Any],
    kept: Sequence[Crossing],
    config: HotConfig,
    asked: Mapping[Crosser, Asked] | None = None,
) -> Iterator[str]:
    """A memory budget that everything compressible, compressed, still exceeds.

    Args:
        found, chosen: what crosses, and how it is stored under ``config``.
        kept: the record of it. asked: of some of ``found``, for its storage.
    """
    budget = config.memory_budget
    if budget is None:
        return
    before, held = (sum(getattr(c, name) for c in kept) for name in ("bytes_before", "bytes"))
    wanted = budget * before if isinstance(budget, float) else budget
    least = dataclasses.replace(config, memory_budget=0)
    if held <= wanted or plan_storage(found, least, asked=asked) != chosen:
        return
    yield (
        f"memory_budget={budget!r} cannot be met in a graph: the least that it can hold is {held} "
        f"bytes ({held / before:.2f} of {before} uncompressed). Ask for no less, or allow more by "
        f"memory='all', memory_bits=4 (now memory='{config.memory}', "
        f"memory_bits={config.memory_bits or TRUSTED_BITS})."
    )


def check_peak(met: BudgetReport, allowance: Allowance) -> None:
    """A budget of the peak that what stands and what is held exceed, before any step ran.

    Predicted peaks err by some per cent; what is held between forward and backward does not.

    Raises:
        OptionError: that is so.
    """
    if allowance.strict and met.least is not None and met.standing + met.held > met.asked:
        expected = f"at least {memory_text(met.peak - met.to_come)}: {_least(met)}"
        raise OptionError.value("peak_budget", memory_text(met.asked), expected)


def unmet_peak(met: BudgetReport, config: HotConfig) -> Iterator[str]:
    """A budget of the peak that is predicted to be exceeded whatever is stored."""
    if met.least is not None and not met.between and met.peak > met.asked:
        to_come = f", {memory_text(met.to_come)} an optimizer may add" if met.to_come else ""
        yield (
            f"peak_budget={config.peak_budget!r} is predicted not to be met: a step's least "
            f"peak is {memory_text(met.peak)}, {_least(met)}{to_come}. {LESS}"
        )


def _least(met: BudgetReport) -> str:
    return (
        f"{memory_text(met.standing)} stand before a step (parameters, inputs), "
        f"{memory_text(met.rise)} are the least that it is predicted to add"
    )


def idle_bits(names: Iterable[str], config: HotConfig) -> Iterator[str]:
    """Globs of memory_override that match no tensor of a graph which crosses to its backward.

    ``names``: of those that do, as profiles have them.
    """
    given = list(names)
    for glob, bits in config.memory_override:
        alone = dataclasses.replace(config, memory_override=((glob, bits),))
        if not any(map(alone.asked_of, given)):
            yield (
                f"got memory_override with {glob!r}, which matches no tensor that this graph keeps "
                f"for its backward; it keeps {_some(given)}. Correct the glob, unless another "
                "graph of the model has it."
            )


def _some(names: Sequence[str]) -> str:
    listed = [repr(name) for name in names[:_LISTED]]
    more = [f"... ({len(names)} in all)"] if len(names) > _LISTED else []
    return ", ".join(listed + more)
