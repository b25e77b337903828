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
from hot_compile.passes.storage.layout import Layout, in_memory, layout_of, packed_bytes

EXACT = (Scheme.EXACT,)
TRUSTED_BITS = 6
"""Fewest bits of what was not measured, unless the user says otherwise."""
_EIGHT = 8
_WORTH = 3 / 4
"""Share of a tensor's bits from which storing it in so many is not worth it."""
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
    masks: int = 0
    """How many are kept beside it, a bit an element each."""


@dataclasses.dataclass(frozen=True)
class Offers:
    """What a tensor may be stored as."""

    schemes: tuple[Scheme, ...] = EXACT
    """Finest first; only ``exact`` where ``reason`` says why."""
    by_measure: tuple[Scheme, ...] = ()
    """Others, for what was measured."""
    reason: str = ""


def offers(saved: fx.Node, need: Need, sample: Sample | None) -> Offers:
    """Of a floating-point tensor of the forward.

    ``sample``: where it has the samples of a batch; None: nowhere.
    """
    if need.reason:
        return Offers(reason=need.reason)
    meeting = [s for s, spec in SPECS.items() if need.kind in spec.meets]
    suiting = [s for s in meeting if _suits(saved, need, s) and _is_smaller(saved, need, s)]
    problems = {s: p for s in suiting if isinstance(p := layout_of(in_memory(saved), s), str)}
    laid_out = [s for s in suiting if s not in problems]
    measured = _by_measure(saved, need, laid_out, sample)
    finest = max((s.spec.bits for s in laid_out), default=0)
    if need.masks > 1 and not problems and finest < _fewest(need):
        laid_out, problems = [], {Scheme.EXACT: f"{need.masks} masks are made of it: too many bits"}
    if not laid_out:
        few = "meets a softmax or a steep function, which want 12 bits: too few less than it has"
        return Offers(by_measure=measured, reason=next(reversed(problems.values()), few))
    return Offers((Scheme.EXACT, *laid_out), measured)


def _suits(saved: fx.Node, need: Need, scheme: Scheme) -> bool:
    """Of schemes of as many bits the one that costs least where it is."""
    if scheme.spec.bits != _EIGHT or need.kind is Kind.CHANNEL:
        return True
    image = saved.meta["val"].dim() >= IMAGE_DIMS or need.convolution
    if need.kind is Kind.COMMON and (image or scheme.spec.unit is Unit.CHANNEL):
        return image and scheme.spec.unit is Unit.CHANNEL
    return _along_rows(saved, need) is (scheme.spec.unit is Unit.ROW)


def _along_rows(saved: fx.Node, need: Need) -> bool:
    """A scale a row costs no pass of its own."""
    layout = layout_of(in_memory(saved), Scheme.ROWS8)
    if not isinstance(layout, Layout):
        return False
    image = saved.meta["val"].dim() >= IMAGE_DIMS
    return need.rows or image or hint(layout.cut[1]) <= _ONE_PASS


def _fewest(need: Need) -> int:
    """Bits that it is stored in at least where nobody asks for fewer."""
    return _EIGHT if need.rows else TRUSTED_BITS


def _is_smaller(saved: fx.Node, need: Need, scheme: Scheme) -> bool:
    """Of 16 bits, 12 are not worth two passes."""
    return scheme.spec.bits + need.masks < _WORTH * 8 * saved.meta["val"].dtype.itemsize


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
