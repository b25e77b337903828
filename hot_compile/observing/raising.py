"""Which stored tensors make a gradient leave its budget, and in how many bits they are to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hot_compile.config import UNCOMPRESSED
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile.lqs import errors_of, stays_within
from hot_compile.passes.profile.profile import StorageMeasure

_EXACT = "exact"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor that crosses to the backward, in one step: how it is stored, and what that loses."""

    scheme: str
    """As usual steps store it."""
    errors: Mapping[str, StorageMeasure]
    """By scheme, finest first: what storing it so does to the gradients that it feeds."""

    def over(self, budget: float) -> bool:
        """As it is stored it takes more than its share of ``budget``."""
        return self.scheme in self.errors and not stays_within(self.errors[self.scheme], budget)

    def finer(self, budget: float) -> int:
        """Bits of the next finer scheme that stays within its share; ``UNCOMPRESSED`` if none."""
        now = Scheme(self.scheme).spec.bits
        bits = {Scheme(s).spec.bits: m for s, m in self.errors.items()}
        fit = (n for n in sorted(bits) if n > now and stays_within(bits[n], budget))
        return next(fit, UNCOMPRESSED)


def raised_bits(
    seen: Mapping[str, Stored], budget: float, known: Mapping[str, str]
) -> dict[str, str]:
    """Tensors to be stored in more bits than so far: how many, and why, in words.

    Args:
        seen: tensors by name, as one step had them.
        budget: of a gradient's relative error.
        known: what was raised before; no tensor is raised to what it was already.
    """
    found = {}
    for name, tensor in seen.items():
        if tensor.over(budget):
            bits = tensor.finer(budget)
            if bits > bits_of(known.get(name, "0 bits")):
                lost = errors_of(tensor.errors[tensor.scheme])
                found[name] = f"{in_words(bits)}: error {lost} as {tensor.scheme}"
    return found


def in_words(bits: int) -> str:
    """``8 bits``, or ``exact``."""
    return _EXACT if bits == UNCOMPRESSED else f"{bits} bits"


def bits_of(text: str) -> int:
    """The bits that a text of :func:`raised_bits` begins with. Raises ValueError if it has none."""
    what = text.split(":")[0]
    return UNCOMPRESSED if what == _EXACT else int(what.removesuffix(" bits"))


def bits_by_tensor(raised: Mapping[str, str]) -> Iterable[tuple[str, int]]:
    """(tensor, bits) for option ``memory_override``."""
    return ((name, bits_of(text)) for name, text in raised.items())
