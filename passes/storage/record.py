"""What crosses from forward to backward, as a record: the memory a training step holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from torch import fx

from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.base.site import bytes_of
from hot_compile.passes.storage.choose import Asked
from hot_compile.passes.storage.crossers import Crosser, is_packed


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One tensor kept for the backward (parameters and user inputs are held anyway: not listed)."""

    name: str
    """The forward graph's node."""
    module: str
    """Path of the module that produced it, '' if unknown."""
    dtype: str
    """Of the tensor before it is stored."""
    shape: tuple[str, ...]
    bytes: int
    """As it is stored, its parameters and masks included; 0 if it waits in host memory."""
    bytes_before: int
    """Uncompressed."""
    scheme: str
    """How it is stored: a ``Scheme``."""
    reason: str
    """Why it is not stored smaller, '' if it could be; or the measured errors behind the choice."""
    packed: bool
    """A part of what one of our operators made of a layer's x."""
    parts: tuple[str, ...] = ()
    """Names of the forward's nodes that are kept in its place, its own if it is kept as it is."""
    seconds: float | None = 0.0
    """Predicted time of storing it so, less what leaving it as it is takes (negative: it wins
    time); None where the device has no rates."""
    asked_bits: int = 0
    """Fewest bits that an option or a monitor asks for it, if it might have fewer; 0: nobody."""
    host_bytes: int = 0
    """As it is stored, of pinned host memory."""


def crossing(
    found: Sequence[Crosser],
    stored: Mapping[Crosser, tuple[Scheme, tuple[fx.Node, ...]]],
    seconds: Mapping[Crosser, float | None],
    verdicts: Mapping[Crosser, str] | None = None,
    asked: Mapping[Crosser, Asked] | None = None,
    hosted: Set[Crosser] = frozenset(),
) -> tuple[Crossing, ...]:
    """The record of ``found``, largest first.

    Args:
        found: what the forward keeps.
        stored: scheme and nodes of those that are stored otherwise than as they are.
        seconds: what that costs, as predicted before it was done.
        verdicts: what was measured of some of them, in words.
        asked: how some of them were to be stored.
        hosted: those of them that wait in host memory.
    """
    kept, told = [], verdicts or {}
    for crosser in found:
        scheme, nodes = stored.get(crosser, (Scheme.EXACT, (crosser.saved,)))
        value = crosser.saved.meta["val"]
        size = sum(bytes_of(node.meta["val"]) for node in nodes)
        away = crosser in hosted
        entry = Crossing(
            name=crosser.name,
            module=crosser.module,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(str(length) for length in value.shape),
            bytes=0 if away else size,
            bytes_before=bytes_of(value),
            scheme=scheme.value,
            reason=told.get(crosser) or crosser.reason,
            packed=is_packed(crosser.saved),
            parts=tuple(node.name for node in nodes),
            seconds=seconds.get(crosser, 0.0) if crosser in stored else 0.0,
            asked_bits=_bits((asked or {}).get(crosser, 0)),
            host_bytes=size if away else 0,
        )
        kept.append(entry)
    return tuple(sorted(kept, key=lambda c: (-c.bytes, c.name)))


def _bits(asked: Asked) -> int:
    return asked.spec.bits if isinstance(asked, Scheme) else asked
