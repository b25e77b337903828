"""(a tensor, what its readers need) -> what it may be stored as, by the table of schemes.

Which of these it is stored as is said in ``choose`` alone.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from hot_compile.passes.base.graph import IMAGE_DIMS
from hot_compile.passes.base.schemes import SPECS, Kind, Scheme, Unit
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.storage.around import Sample
from hot_compile.passes.storage.chain import Chain
from hot_compile.passes.storage.channels_last import in_memory
from hot_compile.passes.storage.layout import Layout, layout_of, packed_bytes

EXACT = (Scheme.EXACT,)
_EIGHT = 8
_ONE_PASS = 1024
"""Elements of a row that Inductor reduces without a loop. A longer one would be read twice where no
norm goes over it anyway; groups are not."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What a tensor's readers need of it."""

    kind: Kind = Kind.RELATIVE
    reason: str = ""
    """Why it is to stay exact, if it is."""
    rows: bool = False
    """A norm's backward sums over its rows."""
    convolution: bool = False
    """A convolution reads it, whatever its dimensions."""
    chain: Chain | None = None
    """What is recomputed from it: to be tried, unless that is multiples of it."""


@dataclasses.dataclass(frozen=True)
class Offers:
    """What a tensor may be stored as."""

    schemes: tuple[Scheme, ...] = EXACT
    """Finest first; only ``exact`` where ``reason`` says why."""
    by_measure: tuple[Scheme, ...] = ()
    """Others, for what was measured."""
    reason: str = ""


def bits_of_masks(saved: fx.Node) -> Offers:
    """Of a tensor of bools."""
    layout = layout_of(in_memory(saved), Scheme.BITS)
    if isinstance(layout, Layout):
        return Offers((Scheme.EXACT, Scheme.BITS))
    return Offers(reason=layout)


def offers(saved: fx.Node, need: Need, sample: Sample | None) -> Offers:
    """Of a floating-point tensor of the forward.

    ``sample``: where it has the samples of a batch; None: nowhere.
    """
    if need.reason:
        return Offers(reason=need.reason)
    plain = need.chain is None or need.chain.plain
    if need.kind is Kind.ABSOLUTE and not plain:
        return Offers(reason="meets a softmax behind more than a multiplication: no bound is known")
    meeting = [s for s, spec in SPECS.items() if need.kind in spec.meets]
    suiting = [s for s in meeting if _suits(saved, need, s) and _is_smaller(saved, s)]
    problems = {s: p for s in suiting if isinstance(p := layout_of(in_memory(saved), s), str)}
    laid_out = [s for s in suiting if s not in problems]
    measured = _by_measure(saved, need, laid_out, sample)
    if not laid_out:
        few = "meets a softmax, which wants 12 bits: too few less than it has"
        return Offers(by_measure=measured, reason=next(reversed(problems.values()), few))
    problem, kept = ("", laid_out) if plain else _tried(saved, need, laid_out)
    if not kept:
        return Offers(reason=problem)
    return Offers((Scheme.EXACT, *kept), measured)


def _suits(saved: fx.Node, need: Need, scheme: Scheme) -> bool:
    """Of schemes of as many bits the one that costs least where it is."""
    if scheme.spec.bits != _EIGHT or need.kind is Kind.CHANNEL:
        return True
    if need.kind is Kind.COMMON:
        image = saved.meta["val"].dim() >= IMAGE_DIMS or need.convolution
        return image is (scheme.spec.unit is Unit.CHANNEL)
    return _along_rows(saved, need) is (scheme.spec.unit is Unit.ROW)


def _along_rows(saved: fx.Node, need: Need) -> bool:
    """A scale a row costs no pass of its own."""
    layout = layout_of(in_memory(saved), Scheme.ROWS8)
    if not isinstance(layout, Layout):
        return False
    image = saved.meta["val"].dim() >= IMAGE_DIMS
    return need.rows or image or hint(layout.cut[1]) <= _ONE_PASS


def _is_smaller(saved: fx.Node, scheme: Scheme) -> bool:
    """Of 16 bits, 12 are not worth two passes."""
    return scheme.spec.bits <= _EIGHT or saved.meta["val"].dtype.itemsize > 2


def _by_measure(
    saved: fx.Node, need: Need, offered: list[Scheme], sample: Sample | None
) -> tuple[Scheme, ...]:
    """What else it may be stored as, if that was measured: more bits, or around what samples have
    in common. What a softmax sees errs absolutely, and tolerates fewer where that is small."""
    known = {s.spec.bits for s in offered}
    groups = [s for s, spec in SPECS.items() if spec.unit is Unit.GROUP and s is s.plain]
    finer = [s for s in groups if not s.spec.around and s.spec.bits >= _EIGHT]
    found = [s for s in finer if s.spec.bits not in known]
    if sample is not None and need.kind is not Kind.ABSOLUTE:
        found += (s for s in groups if s.spec.around)
    value = in_memory(saved)
    laid_out = (s for s in found if isinstance(layout_of(value, s), Layout))
    return tuple(s for s in laid_out if packed_bytes(value, s, sample or ()) < bytes_of(value))


def _tried(saved: fx.Node, need: Need, schemes: list[Scheme]) -> tuple[str, list[Scheme]]:
    """(the last problem, those of ``schemes`` that what is recomputed from it tolerates).

    If it does not tolerate the finest: one that is fine near zero, where functions bend, or uniform
    where codes are coarse, as a tanh wants it, whose slope is 1 - t^2.
    """
    assert need.chain is not None
    problem, kept = "", []
    for scheme in schemes:
        problem = need.chain.try_scheme(scheme, saved)
        if problem:
            break  # a coarser one would do worse
        kept.append(scheme)
    for scheme in _instead(saved, need) if not kept else ():
        problem = need.chain.try_scheme(scheme, saved)
        if not problem:
            return "", [scheme]
    return problem, kept


def _instead(saved: fx.Node, need: Need) -> list[Scheme]:
    common = need.kind is Kind.COMMON
    if need.kind is not Kind.RELATIVE and not common:
        return []
    eight = Scheme.ROWS8 if _along_rows(saved, need) else Scheme.GROUPS8
    every = (eight, Scheme.GROUPS12) if common else (Scheme.GROUPS12,)
    laid_out = (s for s in every if isinstance(layout_of(in_memory(saved), s), Layout))
    return [s for s in laid_out if _is_smaller(saved, s)]
