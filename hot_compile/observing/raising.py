"""What of a layer's products and of stored tensors is to blame, and what it gets instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from hot_compile.config import UNCOMPRESSED, Strategy
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile.lqs import errors_of, stays_within
from hot_compile.passes.profile.profile import StorageMeasure

_USUAL = 0.01
"""Error of a g_w by INT8 of which nothing cancels."""
_PARTS = 3
"""What is passed on may have a third of the budget, since it is lost for several layers."""
_EXACT = "exact"
_AROUND = " around the batch's mean"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor that crosses to the backward, in one step: how it is stored, and what that loses."""

    scheme: str
    """As usual steps store it."""
    errors: Mapping[str, StorageMeasure]
    """By scheme, finest first: what storing it so does to the gradients that it feeds."""
    held: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By scheme: bytes that it takes; where that is not known bits count."""

    def amplified(self, times: float) -> Stored:
        """With what is passed on to other layers counted so many times, if it is more so."""
        errors = {
            scheme: StorageMeasure(m.error, m.passed * max(1.0, times / _PARTS))
            for scheme, m in self.errors.items()
        }
        return dataclasses.replace(self, errors=errors)

    def over(self, budget: float) -> bool:
        """As it is stored it takes more than its share of ``budget``."""
        return self.scheme in self.errors and not stays_within(self.errors[self.scheme], budget)

    @property
    def lost(self) -> float:
        """What storing it as usual does to the worst of the gradients that it feeds."""
        now = self.errors.get(self.scheme)
        return max(now.error, now.passed) if now else 0.0

    def offer(self, budget: float, known: str | None = None) -> str | None:
        """The scheme of fewest bytes that stays within its share, in words; exact if none does.

        ``known``: what it was raised to before. Then only more bytes count, so that this ends, and
        None is what something else is wrong with.
        """
        now, least = Scheme(self.scheme), self._size(asked_in(known)) if known else -math.inf
        fit = [Scheme(name) for name, m in self.errors.items() if stays_within(m, budget)]
        finer = [s for s in fit if s.spec.around or s.spec.bits > now.spec.bits]
        sizes = {s: self._size(asked_in(in_words(s))) for s in finer}
        if least <= self._size(asked_in(in_words(now))):  # it is as it was raised to
            finer = [s for s in finer if sizes[s] > least]
        best = min(finer, key=lambda s: (sizes[s], -s.spec.bits), default=Scheme.EXACT)
        return in_words(best) if sizes.get(best, math.inf) > least else None

    def more(self, text: str) -> float:
        """Bytes that it takes more if it is stored as a text of :func:`raised_bits` says.

        Exact it takes 32 bits a value, at most.
        """
        asked, now, bits = (
            asked_in(text),
            self.held.get(self.scheme, 0),
            Scheme(self.scheme).spec.bits,
        )
        return (now * 32 / bits if asked == UNCOMPRESSED else self._size(asked)) - now

    def _size(self, asked: int | str) -> float:
        """Bytes of what option ``memory_override`` asks for so; bits where they are not known."""
        alike = {s for s in map(Scheme, self.errors) if asked_in(in_words(s)) == asked}
        sizes = (float(self.held.get(s, s.spec.bits)) for s in alike)
        return next(sizes, math.inf if asked == UNCOMPRESSED else 0.0)


def amplification(own: Mapping[str, float]) -> float:
    """How many times an error of g_y is in a g_w at worst, by what INT8 loses there.

    Where almost all of g_w cancels, what its own operands lose is many times what it usually is;
    so is what layers behind and what is stored for them lose of the gradient that they pass on.

    Args:
        own: error of g_w by each layer's own strategy.
    """
    return max(1.0, max(own.values(), default=0.0) / _USUAL)


def raised_bits(
    seen: Mapping[str, Stored], budget: float, known: Mapping[str, str], amplified: float = 1.0
) -> dict[str, str]:
    """Tensors to be stored otherwise than so far: how, and why, in words.

    Args:
        seen: tensors by name, as one step had them.
        budget: of a gradient's relative error.
        known: what was raised before; no tensor is raised to what it was already.
        amplified: by how much what is passed on counts more.
    """
    found = {}
    for name, measured in seen.items():
        tensor = measured.amplified(amplified)
        if tensor.over(budget):
            offer, lost = tensor.offer(budget, known.get(name)), measured.errors[tensor.scheme]
            if offer is not None:
                found[name] = f"{offer}: error {errors_of(lost)} as {tensor.scheme}"
    return found


def affordable(
    wanted: Mapping[str, str], seen: Mapping[str, Stored], room: float
) -> dict[str, str]:
    """Those of ``wanted`` that fit into so many bytes together; what loses most comes first.

    Args:
        wanted: as :func:`raised_bits` has it. seen: the tensors by name.
    """
    found = {}
    for name in sorted(wanted, key=lambda name: seen[name].lost, reverse=True):
        more = max(0.0, seen[name].more(wanted[name]))
        if more <= room:
            found[name], room = wanted[name], room - more
    return found


def costliest(lost: Mapping[str, float], kept: float) -> list[str]:
    """The worst of layers, without which a share of at most ``kept`` is left of what all lose.

    Args:
        lost: squares, which add up as what is independent does.
    """
    names, rest = sorted(lost, key=lambda name: lost[name], reverse=True), sum(lost.values())
    most, found = kept * rest, list[str]()
    for name in names:
        if rest <= most:
            break
        found.append(name)
        rest -= lost[name]
    return found


def exact_products(off: Mapping[str, float], before: str | None) -> str:
    """Which products of a layer become exact, and why: the text that a monitor keeps of it.

    Args:
        off: errors of those that are off, by ``g_x`` and ``g_w``. before: the text so far, if any.
    """
    what = f"{next(iter(off))}: " if len(off) == 1 and before is None else ""
    return f"{what}error {max(off.values()):.3g}"


def strategy_in(text: str) -> Strategy:
    """What is left of a layer's integer products by a text of :func:`exact_products`."""
    alone = {"g_w": Strategy.GX_ONLY, "g_x": Strategy.GW_ONLY}
    return alone.get(text.split(":")[0], Strategy.EXACT)


def in_words(scheme: Scheme) -> str:
    """``8 bits``, ``8 bits around the batch's mean``, or ``exact``."""
    if scheme is Scheme.EXACT:
        return _EXACT
    return f"{scheme.spec.bits} bits{_AROUND if scheme.spec.around else ''}"


def asked_in(text: str) -> int | str:
    """What option ``memory_override`` has for a text of :func:`raised_bits`.

    Raises ValueError if that does not begin as it should.
    """
    what = text.split(":")[0]
    if what == _EXACT:
        return UNCOMPRESSED
    bits = int(what.removesuffix(_AROUND).removesuffix(" bits"))
    return f"around{bits}" if what.endswith(_AROUND) else bits


def bits_by_tensor(raised: Mapping[str, str]) -> Iterable[tuple[str, int | str]]:
    """(tensor, how it is to be stored) for option ``memory_override``."""
    return ((name, asked_in(text)) for name, text in raised.items())
