"""How a tensor may be stored between forward and backward: one entry a scheme.

Values are coded by their fourth root (``CODES``): the step of the grid shrinks with the value, so
that one outlier a hundred times as large as the rest of its group leaves the rest an error of 3 %,
where a uniform grid of as many steps leaves 25 % of a standard deviation. On normally distributed
values both err alike.
"""

from __future__ import annotations

import dataclasses
from enum import Enum


class Unit(str, Enum):
    """What shares a scale."""

    NONE = "none"
    ROW = "row"
    """The innermost dimension; of a channels-last image the channels of one position."""
    CHANNEL = "channel"
    """Everything at one index of dimension 1. Stored as the distance from the channel's mean."""
    GROUP = "group"
    """Up to 128 elements side by side in memory."""


class Kind(str, Enum):
    """What an error counts beside, for those who read a tensor."""

    RELATIVE = "relative"
    """The tensor: of a layer's product, of an activation's slope."""
    COMMON = "common"
    """Likewise, and no norm bounds it: what rows have in common may be most of them."""
    CHANNEL = "channel"
    """What is left of a channel without its mean: a batch norm's."""
    ABSOLUTE = "absolute"
    """Nothing, its size counts: of what a softmax sees."""
    ATTENDED = "attended"
    """The tensor, of an attention's values: what they have in common cancels behind it."""


class Scheme(str, Enum):
    """What a crossing tensor is stored as."""

    EXACT = "exact"
    """As it is."""
    ROWS8 = "rows8"
    """8-bit codes, a bf16 scale a row. Its absmax is one more reduction of a kernel that goes over
    the row anyway, or all its own."""
    ROWS8_MASK = "rows8_mask"
    """The same in seven bits: the lowest of each byte holds an element of a mask, which so costs
    neither memory nor a pass of its own."""
    GROUPS8 = "groups8"
    """8-bit codes, a bf16 scale a group."""
    GROUPS8_MASK = "groups8_mask"
    """The same in seven bits beside a mask."""
    CHANNELS8 = "channels8"
    """8-bit codes of the distance from the channel's mean; scale and mean in fp32."""
    CHANNELS8_MASK = "channels8_mask"
    """The same in seven bits beside a mask."""
    GROUPS12 = "groups12"
    """12 uniform bits, two pieces of a group in planes of 16 and 8 bits, a bf16 scale a group: for
    what a softmax sees."""
    AROUND12 = "around12"
    """12 uniform bits of the distance from the batch's mean at each position; the mean in the
    tensor's dtype. For samples that have far more in common than tells them apart."""
    AROUND8 = "around8"
    """The same in 8-bit codes."""
    AROUND6 = "around6"
    """The same in 6-bit codes."""
    GROUPS6 = "groups6"
    """6-bit codes, four pieces of a group in planes of 16 and 8 bits, a bf16 scale a group."""
    INT4 = "int4"
    """Min-max INT4, two to a byte; a group's bf16 scale and minimum in one 32-bit word, so that
    whoever unpacks makes one load of both."""
    BITS = "bits"
    """A mask, eight elements to a byte, one of each piece of a group. Lossless."""

    def __str__(self) -> str:
        return self.value

    @property
    def spec(self) -> Spec:
        """This scheme's entry in the table."""
        return SPECS[self]

    @property
    def plain(self) -> Scheme:
        """The scheme whose bytes hold no mask."""
        return {masked: plain for plain, masked in _MASKED.items()}.get(self, self)

    @property
    def masked(self) -> Scheme:
        """The scheme whose bytes hold a mask, too; itself where there is none."""
        return _MASKED.get(self, self)


_MASKED = {
    Scheme.ROWS8: Scheme.ROWS8_MASK,
    Scheme.GROUPS8: Scheme.GROUPS8_MASK,
    Scheme.CHANNELS8: Scheme.CHANNELS8_MASK,
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of the table of schemes."""

    unit: Unit
    bits: int
    """Of an element."""
    parameter_bytes: int
    """Of what shares a scale."""
    levels: int
    """Codes of one sign, 0: not coded by its root. The next is infinity, and -levels - 2 is NaN."""
    error: float
    """Relative error (RMS over RMS) of normally distributed values."""
    pieces: int = 1
    """That a group is packed in, where its elements share bytes: one of each piece a byte."""
    meets: frozenset[Kind] = frozenset()
    """Needs that it is trusted to meet unmeasured, as far as ``error`` does."""
    around: Scheme | None = None
    """How the distance from the batch's mean is stored, if that is what is."""


_RELATIVE = frozenset({Kind.RELATIVE})
_CHANNEL = frozenset({Kind.CHANNEL, Kind.COMMON})
_FLAT = frozenset({Kind.RELATIVE, Kind.COMMON})
_EIGHT = _FLAT | {Kind.ATTENDED}
_ABSOLUTE = frozenset({Kind.ABSOLUTE})

SPECS: dict[Scheme, Spec] = {
    Scheme.EXACT: Spec(Unit.NONE, 0, 0, 0, 0.0),
    Scheme.GROUPS12: Spec(Unit.GROUP, 12, 2, 0, 0.0004, pieces=2, meets=_ABSOLUTE),
    Scheme.ROWS8: Spec(Unit.ROW, 8, 2, 126, 0.012, meets=_EIGHT),
    Scheme.ROWS8_MASK: Spec(Unit.ROW, 8, 2, 62, 0.024),
    Scheme.GROUPS8: Spec(Unit.GROUP, 8, 2, 126, 0.011, meets=_EIGHT),
    Scheme.GROUPS8_MASK: Spec(Unit.GROUP, 8, 2, 62, 0.022),
    Scheme.CHANNELS8: Spec(Unit.CHANNEL, 8, 8, 126, 0.013, meets=_CHANNEL),
    Scheme.CHANNELS8_MASK: Spec(Unit.CHANNEL, 8, 8, 62, 0.026),
    Scheme.GROUPS6: Spec(Unit.GROUP, 6, 2, 30, 0.046, pieces=4, meets=_RELATIVE),
    Scheme.INT4: Spec(Unit.GROUP, 4, 4, 0, 0.1, pieces=2, meets=_FLAT),
    Scheme.AROUND12: Spec(Unit.GROUP, 12, 2, 0, 0.0004, pieces=2, around=Scheme.GROUPS12),
    Scheme.AROUND8: Spec(Unit.GROUP, 8, 2, 126, 0.011, around=Scheme.GROUPS8),
    Scheme.AROUND6: Spec(Unit.GROUP, 6, 2, 30, 0.046, pieces=4, around=Scheme.GROUPS6),
    Scheme.BITS: Spec(Unit.NONE, 1, 0, 0, 0.0, pieces=8),
}
"""Finest first, of those that meet one kind of need."""
