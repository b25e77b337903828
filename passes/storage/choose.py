"""(crossing tensors, config) -> Scheme of each: a pure function. Storage is chosen here only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import TypeAlias

from torch import fx

from hot_compile.config import HotConfig, Memory
from hot_compile.passes.base.graph import IMAGE_DIMS
from hot_compile.passes.base.schemes import Kind, Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.profile.lqs import storable
from hot_compile.passes.profile.profile import StorageMeasure
from hot_compile.passes.storage.crossers import UNCHECKED, Crosser, base
from hot_compile.passes.storage.offers import TRUSTED_BITS
from hot_compile.passes.storage.prices import StoragePrice, held_bytes

_EXACT = (Scheme.EXACT,)
_MEASURED_BITS = 4

Asked: TypeAlias = int | Scheme
"""What an option or a monitor asks for a tensor: bits at least, or one scheme."""
Measured = Mapping[Crosser, Mapping[str, StorageMeasure]]
"""What a profile knows of tensors: errors by scheme."""


def plan_storage(
    found: Sequence[Crosser],
    config: HotConfig,
    price: StoragePrice | None = None,
    won: float = 0.0,
    measured: Measured | None = None,
    asked: Mapping[Crosser, Asked] | None = None,
) -> dict[Crosser, Scheme]:
    """How each crossing tensor is stored.

    Without a budget: as small as it tolerates and ``config.memory_bits`` allows, but what norms
    read, and images, no smaller than the 8 bits that cost no pass of their own. What was measured:
    as small as stays within the budget of errors; what norms read, and images, below 8 bits only if
    the user asks for so few. With a budget of bytes: in order
    of error per byte saved, until the budget holds. That order does not depend on the budget, so a
    smaller budget never holds more.

    Args:
        found: what crosses.
        config: the user's options.
        price: seconds that storing takes; wanted by ``memory="free"``.
        won: seconds that layers win, for ``memory="free"`` to spend.
        measured: by tensor, as far as it was.
        asked: how some of them are to be stored, or in how many bits at least, whatever else is
            said.
    """
    if config.memory is Memory.OFF:
        return {}
    ladders = _ladders(found, config, measured or {}, asked or {})
    if config.memory is Memory.FREE:
        return _paid_for(ladders, price, won)
    if config.memory_budget is None:
        return {c: _with_mask(c, ladder[-1]) for c, ladder in ladders.items() if len(ladder) > 1}
    sizes = {c: bytes_of(c.saved.meta["val"]) for c in found}
    held, budget = sum(sizes.values()), _in_bytes(config.memory_budget, sum(sizes.values()))
    chosen: dict[Crosser, Scheme] = {}
    for _, saved, crosser, scheme in sorted(_steps(ladders), key=lambda step: step[:2]):
        if held <= budget:
            break
        chosen[crosser] = scheme
        held -= saved
    return {c: _with_mask(c, scheme) for c, scheme in chosen.items()}


def worth_it(
    chosen: Mapping[Crosser, Scheme], price: StoragePrice, most: float
) -> dict[Crosser, Scheme]:
    """``chosen`` without the dearest by bytes saved, so that the rest costs no more than ``most``
    seconds. Tensors of one storage stay or go together; what has no price stays."""
    storages: dict[fx.Node, list[tuple[Crosser, Scheme]]] = {}
    for crosser, scheme in chosen.items():
        storages.setdefault(base(crosser.saved), []).append((crosser, scheme))
    offers = [_offer(pairs, price) for pairs in storages.values()]
    total = sum(offer.cost for offer in offers)
    kept = dict(chosen)
    for offer in sorted(offers, key=lambda offer: offer.rank, reverse=True):
        if total <= most:
            break
        total -= offer.cost
        for crosser, _ in offer.schemes:
            del kept[crosser]
    return kept


def _offer(pairs: Sequence[tuple[Crosser, Scheme]], price: StoragePrice) -> _Offer:
    seconds = sum(price(crosser, scheme) or 0.0 for crosser, scheme in pairs)
    whole = sum(_kept(crosser) for crosser, _ in pairs)
    held = sum(crosser.held(scheme) for crosser, scheme in pairs)
    return _Offer(tuple(pairs), seconds, whole - held)


def _kept(crosser: Crosser) -> int:
    """Bytes where it is not stored."""
    own = bytes_of(crosser.saved.meta["val"])
    return own if crosser.otherwise is None else crosser.otherwise


@dataclasses.dataclass(frozen=True)
class Within:
    """What is stored so that a step adds no more than it may."""

    chosen: dict[Crosser, Scheme]
    rise: int
    """Bytes that the step adds, as predicted."""
    above: int
    """The same of the next choice that holds more; ``rise`` if nothing is stored."""
    least: int | None = None
    """What the least adds, if what was allowed is less than that."""
    hosted: frozenset[Crosser] = frozenset()
    """What waits in host memory, as it is stored."""


def plan_within(
    found: Sequence[Crosser],
    config: HotConfig,
    rise: Callable[[Mapping[Crosser, Scheme], Set[Crosser]], int],
    allowed: int,
    price: StoragePrice | None = None,
    measured: Measured | None = None,
    asked: Mapping[Crosser, Asked] | None = None,
    host: StoragePrice | None = None,
) -> Within:
    """As few tensors stored, cheapest in time first, then by error, as keep within ``allowed``.

    If all of them are not enough, what is kept waits in host memory, cheapest first, too. That
    order does not depend on what is allowed, so that less is never met by holding more. Where
    nothing meets it, all that may be without rising higher.

    Args:
        rise: bytes that a step adds with tensors stored so, and some of them in host memory.
        allowed: bytes that it may add.
        found, config, price, measured, asked: as for :func:`plan_storage`.
        host: seconds of a tensor's way to the host and back, None where it has none.
    """
    ladders = _ladders(found, config, measured or {}, asked or {})
    if config.memory is Memory.OFF:
        ladders = {}
    chosen: dict[Crosser, Scheme] = {}
    away: frozenset[Crosser] = frozenset()
    lowest = above = rise(chosen, away)
    best, hosted = dict(chosen), away
    for crosser, scheme in _cheapest_first(ladders, price):
        if lowest <= allowed:
            break
        chosen[crosser] = _with_mask(crosser, scheme)
        now = rise(chosen, away)
        if now < lowest:
            above, lowest = lowest, now
        if now <= lowest:
            best = dict(chosen)
    for together in _cheapest_away(found, best, config, host) if lowest > allowed else ():
        if lowest <= allowed:
            break
        away |= together
        now = rise(best, away)
        if now < lowest:
            above, lowest, hosted = lowest, now, away
    return Within(best, lowest, above, lowest if lowest > allowed else None, hosted)


def _cheapest_first(
    ladders: dict[Crosser, tuple[Scheme, ...]], price: StoragePrice | None
) -> list[tuple[Crosser, Scheme]]:
    """Every step down every ladder by seconds, then by error, per byte; none before a finer one."""
    steps = []
    for crosser, ladder in ladders.items():
        so_far = (0.0, 0.0)
        for depth, (finer, coarser) in enumerate(pairwise(ladder)):
            saved = max(1, crosser.held(finer) - crosser.held(coarser))
            seconds = _seconds(crosser, coarser, price) - _seconds(crosser, finer, price)
            error = coarser.spec.error - finer.spec.error
            so_far = max(so_far, (max(0.0, seconds) / saved, error / saved))
            steps.append((so_far, depth, -saved, crosser, coarser))
    return [step[3:] for step in sorted(steps, key=lambda step: step[:3])]


def _cheapest_away(
    found: Sequence[Crosser],
    chosen: Mapping[Crosser, Scheme],
    config: HotConfig,
    host: StoragePrice | None,
) -> list[frozenset[Crosser]]:
    """What may wait in host memory, by seconds per byte: views of one storage together."""
    storages: dict[fx.Node, list[Crosser]] = {}
    for crosser in found:
        storages.setdefault(base(crosser.saved), []).append(crosser)
    steps = []
    for place, together in enumerate(storages.values()):
        ways = [(c, chosen.get(c, Scheme.EXACT)) for c in together]
        prices = [host(*way) if host and _may_leave(way[0], config) else None for way in ways]
        known = [seconds for seconds in prices if seconds is not None]
        if len(known) == len(ways):
            size = sum(held_bytes(*way)[1] for way in ways)
            steps.append((sum(known) / max(1, size), place, frozenset(together)))
    return [step[2] for step in sorted(steps, key=lambda step: step[:2])]


def _may_leave(crosser: Crosser, config: HotConfig) -> bool:
    """It is worth a copy, and autograd keeps it as it keeps others."""
    size = bytes_of(crosser.saved.meta["val"])
    return size >= config.memory_min_bytes and not crosser.saved.meta.get(UNCHECKED)


def _seconds(crosser: Crosser, scheme: Scheme, price: StoragePrice | None) -> float:
    """What ``scheme`` is predicted to cost; nothing where that is not known."""
    if price is None or scheme is Scheme.EXACT:
        return 0.0
    return price(crosser, _with_mask(crosser, scheme)) or 0.0


def _ladders(
    found: Sequence[Crosser], config: HotConfig, measured: Measured, asked: Mapping[Crosser, Asked]
) -> dict[Crosser, tuple[Scheme, ...]]:
    return _together({c: _ladder(c, config, measured.get(c), asked.get(c, 0)) for c in found})


def _ladder(
    crosser: Crosser,
    config: HotConfig,
    measured: Mapping[str, StorageMeasure] | None,
    asked: Asked,
) -> tuple[Scheme, ...]:
    """What ``crosser`` may be stored as under ``config``, finest first; the last is the goal."""
    if config.memory is Memory.PAPER and not crosser.feeds_product:
        return _EXACT
    if isinstance(asked, Scheme):
        return (*_EXACT, asked) if asked in crosser.measurable and asked not in _EXACT else _EXACT
    judged = measured if measured and config.error_budget is not None else None
    fewest = max(usual_bits(config, judged is not None), asked)
    if _keeps_eight_bits(crosser, config, bool(judged)):
        fewest = max(fewest, Scheme.ROWS8.spec.bits)
    schemes = storable(crosser.measurable, judged, config) if judged else crosser.schemes
    if asked == Scheme.GROUPS12.spec.bits and crosser.schemes != _EXACT:
        schemes = tuple(s for s in crosser.measurable if s in (*schemes, Scheme.GROUPS12))
    return tuple(s for s in schemes if s in (Scheme.EXACT, Scheme.BITS) or s.spec.bits >= fewest)


def usual_bits(config: HotConfig, judged: bool) -> int:
    """Fewest bits of a tensor of which nothing else is said."""
    return config.memory_bits or (_MEASURED_BITS if judged else TRUSTED_BITS)


def _keeps_eight_bits(crosser: Crosser, config: HotConfig, judged: bool) -> bool:
    """Fewer are for who asks: what is left of a gradient behind a norm is small."""
    if judged and config.memory_bits:
        return False
    asked = config.has_budget
    if crosser.norm:
        return not asked or (config.memory_bits or TRUSTED_BITS) > Scheme.INT4.spec.bits
    image = crosser.saved.meta["val"].dim() >= IMAGE_DIMS and crosser.kind is not Kind.ABSOLUTE
    return image and not asked


def _together(ladders: dict[Crosser, tuple[Scheme, ...]]) -> dict[Crosser, tuple[Scheme, ...]]:
    """Of views of one storage none is stored if one is not: that would keep all of it."""
    alone = {base(c.saved) for c, ladder in ladders.items() if len(ladder) == 1}
    return {c: steps[:1] if base(c.saved) in alone else steps for c, steps in ladders.items()}


@dataclasses.dataclass(frozen=True)
class _Offer:
    """Tensors that lie in one storage, each as a scheme: stored together or not at all."""

    schemes: tuple[tuple[Crosser, Scheme], ...]
    seconds: float
    saved: int

    @property
    def cost(self) -> float:
        """Seconds to be paid for; none where it wins time."""
        return max(0.0, self.seconds)

    @property
    def rank(self) -> tuple[float, int]:
        """Best first: by seconds per byte, and of those that cost nothing the largest."""
        return self.cost / max(1, self.saved), -self.saved


def _paid_for(
    ladders: dict[Crosser, tuple[Scheme, ...]], price: StoragePrice | None, won: float
) -> dict[Crosser, Scheme]:
    """What saves most bytes per second for as long as ``won`` pays for it.

    What storing one tensor is predicted to win is not spent on another.
    """
    taken: dict[Crosser, _Offer] = {}
    spent = 0.0
    for offer in sorted(_offers(ladders, price), key=lambda offer: offer.rank):
        first, _ = offer.schemes[0]
        finer = taken.get(first, _Offer((), 0.0, 0))
        more = offer.cost - finer.cost
        if offer.saved > finer.saved and (more <= 0 or spent + more <= won):
            taken[first] = offer
            spent += more
    return dict(pair for offer in taken.values() for pair in offer.schemes)


def _offers(
    ladders: dict[Crosser, tuple[Scheme, ...]], price: StoragePrice | None
) -> Iterator[_Offer]:
    """All that may be stored at a known price. A tensor alone in its storage: as every scheme."""
    storages: dict[fx.Node, list[Crosser]] = {}
    for crosser, ladder in ladders.items():
        if len(ladder) > 1:
            storages.setdefault(base(crosser.saved), []).append(crosser)
    for together in storages.values():
        ways = [[(c, ladders[c][-1]) for c in together]]
        if len(together) == 1:
            (crosser,) = together
            ways = [[(crosser, scheme)] for scheme in ladders[crosser][1:]]
        for way in ways:
            pairs = [(c, _with_mask(c, scheme)) for c, scheme in way]
            if price and all(price(*pair) is not None for pair in pairs):
                yield _offer(pairs, price)


def _with_mask(crosser: Crosser, scheme: Scheme) -> Scheme:
    """A mask in a tensor's own bytes saves a pass that makes bits of it, at a bit of its own."""
    return scheme if crosser.own_mask is None else scheme.masked


def _in_bytes(budget: float, exact: int) -> float:
    """A fraction (float) of what exact storage holds, or bytes (int)."""
    return budget * exact if isinstance(budget, float) else budget


def _steps(
    ladders: dict[Crosser, tuple[Scheme, ...]],
) -> list[tuple[float, int, Crosser, Scheme]]:
    """(error per byte, bytes saved, tensor, scheme) of every step down every ladder."""
    steps = []
    for crosser, ladder in ladders.items():
        for finer, coarser in pairwise(ladder):
            saved = crosser.held(finer) - crosser.held(coarser)
            error = coarser.spec.error - finer.spec.error
            steps.append((error / max(1, saved), saved, crosser, coarser))
    return steps
