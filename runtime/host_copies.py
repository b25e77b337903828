"""``hot::to_host``, ``hot::fetch``, ``hot::arrive``: tensors wait for the backward in host memory.

The forward's ``to_host`` starts copies into pinned memory while the step goes on. In the backward
``fetch`` starts the copies back, so that ``arrive``, at the first use, waits for little or nothing.
Nothing is kept between calls: streams and events say what follows what. On a CPU they are copies
within its own memory. ``passes/storage/store.py`` places them. Importing this registers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hot_compile.errors import OptionError

LANES = 2
"""Streams that copies to the host take in turns: so many may be under way while a step goes on."""

_LIBRARY = torch.library.Library("hot", "FRAGMENT")
for _schema in (
    "to_host(Tensor[] parts, int lane) -> Tensor[]",
    "fetch(Tensor[] parts, Device device, Tensor[] behind) -> Tensor",
    "arrive(Tensor coming, Tensor[] parts, Device device, Tensor[] behind) -> Tensor[]",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.needs_exact_strides,))

_HOST = torch.device("cpu")


@cache
def _outward(device: torch.device, lane: int) -> torch.cuda.Stream:
    """Copies from ``device`` to the host. A stream has no state but its order: one a process."""
    return torch.cuda.Stream(device)


@cache
def _inward(device: torch.device) -> torch.cuda.Stream:
    """Copies to ``device``, likewise."""
    return torch.cuda.Stream(device)


def _wait_for_lanes(stream: torch.cuda.Stream, device: torch.device) -> None:
    """What comes in ``stream`` from now on finds all copies to the host done."""
    for lane in range(LANES):
        stream.wait_stream(_outward(device, lane))


def _to_host(parts: list[Tensor], lane: int) -> list[Tensor]:
    """``parts`` in host memory; their own may be written over as soon as this returns.

    What is copied from is a copy of ours: Inductor puts other tensors where ``parts`` lay and knows
    of no other stream. It lies in the lane's own memory, which goes back to the lane at once, and
    which only the next call of this lane writes to, behind the copies of this one. So nothing has
    to be kept until the copies are over, no more than ``LANES`` such copies ever lie on the device,
    and the step waits where the bus is too slow for it, not the host.
    """
    device = parts[0].device
    if device.type != "cuda":
        return _copied(parts, _HOST)
    if torch.cuda.is_current_stream_capturing():
        raise OptionError(
            "got a CUDA graph that is captured of a step whose peak_budget is met by copies to "
            "the host, which no graph can hold; expected a step without. Ask for more memory, or "
            "have torch.compile capture it (mode='reduce-overhead'): no copies are chosen then."
        )
    step, side = torch.cuda.current_stream(device), _outward(device, lane)
    step.wait_stream(side)
    with torch.cuda.stream(side):
        staged = [torch.empty_like(part) for part in parts]
    for mine, part in zip(staged, parts, strict=True):
        mine.copy_(part)
    side.wait_stream(step)
    with torch.cuda.stream(side):
        kept = [torch.empty_like(part, device=_HOST, pin_memory=True) for part in parts]
        for there, mine in zip(kept, staged, strict=True):
            there.copy_(mine, non_blocking=True)
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        side.synchronize()  # a user's hook may read on the host what autograd saves
    return kept


class _Coming:
    """Copies on their way back, into memory of the stream that the step runs in."""

    _tensors: Sequence[Tensor] = ()

    def __init__(self, parts: list[Tensor], device: torch.device) -> None:
        self._step, side = torch.cuda.current_stream(device), _inward(device)
        tensors = [torch.empty_like(part, device=device) for part in parts]
        side.wait_stream(self._step)  # which used that memory before
        _wait_for_lanes(side, device)
        with torch.cuda.stream(side):
            for mine, part in zip(tensors, parts, strict=True):
                mine.copy_(part, non_blocking=True)
        self._over, self._tensors = side.record_event(), tensors

    def take(self) -> list[Tensor]:
        """The tensors, which the step waits for; none if it runs in another stream by now."""
        if torch.cuda.current_stream(self._step.device) != self._step:
            return []
        self._step.wait_event(self._over)
        tensors, self._tensors = self._tensors, ()
        return list(tensors)

    def __del__(self) -> None:
        """Nobody took them, because of an exception: who gets their memory waits for the copies."""
        if self._tensors:
            self._step.wait_event(self._over)


def _start(parts: list[Tensor], device: torch.device) -> _Coming | None:
    """The copies' beginning; None where there is nothing to gain by it."""
    return _Coming(parts, device) if device.type == "cuda" else None


def _fetch(parts: list[Tensor], device: torch.device, behind: list[Tensor]) -> Tensor:
    """Start copying ``parts`` to ``device``: a tensor for :func:`_arrive`, with what is coming.

    That is its attribute, so that it lives as long as the tensor, and so that Inductor, which might
    use memory again that another stream still writes to, does not see it.

    ``behind``: what is made before, for whoever puts a graph's nodes in another order.
    """
    ticket = _ticket(parts, device, behind)
    ticket.coming = _start(parts, device)  # type: ignore[attr-defined]
    return ticket


def _ticket(parts: list[Tensor], device: torch.device, behind: list[Tensor]) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=_HOST)


def _arrive(
    coming: Tensor, parts: list[Tensor], device: torch.device, behind: list[Tensor]
) -> list[Tensor]:
    """``parts`` on ``device``: those that ``coming`` brings; where it brings none, copied now.

    ``behind``: as for :func:`_fetch`. By the next one's ticket this waits only when that is under
    way.
    """
    on_way = getattr(coming, "coming", None)
    if on_way is not None and (found := on_way.take()):
        return found
    if device.type == "cuda":
        _wait_for_lanes(torch.cuda.current_stream(device), device)
    return _copied(parts, device)


def _copied(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    made = [torch.empty_like(part, device=device) for part in parts]
    for mine, part in zip(made, parts, strict=True):
        mine.copy_(part, non_blocking=True)
    return made


def _register(name: str, function: object, fake: object) -> None:
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"hot::{name}")(fake)


def _shapes(parts: list[Tensor], device: torch.device = _HOST) -> list[Tensor]:
    return [torch.empty_like(part, device=device) for part in parts]


_register("to_host", _to_host, lambda parts, lane: _shapes(parts))
_register("fetch", _fetch, _ticket)
_register("arrive", _arrive, lambda coming, parts, device, behind: _shapes(parts, device))
