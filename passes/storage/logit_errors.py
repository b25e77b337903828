"""How far rounding q and k moves fused attention's logits, measured while a model trains.

A fused attention's backward works its probabilities out again, of q and k as they were stored and
of the log-sum-exp of what they were. So an error of a logit is a factor on a probability. Stored in
12 bits that is small while logits are below some hundreds, which nothing proves: so now and then
the forward of a step says how large it is. One operator a graph, ``hot::watch_logits``, does
nothing in all other steps, and waits for a GPU in the first one only.

The error of a logit is taken as a standard deviation: codes are whole steps, so every element of k
is off by up to half a step, uniformly, and a row of q times it by ``|q| step / 12**.5``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hot_compile.runtime.planes import STEPS12

log = logging.getLogger("hot_compile")

LIMIT = 0.1
"""Standard deviation of logits' errors up to which probabilities are as good as 12 bits: the
gradients' cosines were above 0.995."""
_EVERY = 64
_UPPER = 16
"""What one of an upper plane's whole numbers counts in codes, which have 4 bits more."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """q or k, or a part of it, as the operator is given it."""

    tensors: int
    """1: as it is. Else upper planes of its codes, then the groups' scales."""
    width: int
    """Elements of a row, which one logit is a sum over."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """One fused attention."""

    factor: float
    """What its logits are multiplied by."""
    query: tuple[Operand, ...]
    key: tuple[Operand, ...]


class Logits:
    """What is known of one graph's logits."""

    def __init__(self) -> None:
        self.error: float | None = None
        """What was too much: q and k are to stay exact."""
        self._calls = 0
        self._coming: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def begin(self) -> None:
        """The graph was compiled, perhaps for another model: the next step is the first."""
        self._calls = 0

    def due(self) -> bool:
        """Whether this step is one that looks: the first ones more often."""
        self._calls += 1
        return self._calls & (self._calls - 1) == 0 or self._calls % _EVERY == 0

    def tell(self, errors: Tensor) -> None:
        """Errors of a step's logits, on their way to the host."""
        event = None
        if errors.is_cuda:
            host = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=True)
            errors, event = host.copy_(errors, non_blocking=True), torch.cuda.Event()
            event.record()
            if self._calls == 1:  # what is too large from the start is to spoil one step only
                event.synchronize()
        self._coming.append((errors, event))

    def found_wanting(self) -> bool:
        """True once: errors that have arrived are more than ``LIMIT``. Waits for none."""
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            worst = self._coming.pop(0)[0].max().item()
            if self.error is None and worst > LIMIT:
                self.error = worst
                return True
        return False


@functools.cache
def logits_of(key: str) -> Logits:
    """Of this process's graphs of that key, compiled again or not."""
    return Logits()


def as_text(attentions: Sequence[Attention]) -> str:
    """What the operator is told of its tensors."""
    return json.dumps([dataclasses.astuple(attention) for attention in attentions])


def _attentions(text: str) -> Iterator[Attention]:
    for factor, *sides in json.loads(text):
        yield Attention(factor, *(tuple(Operand(*given) for given in side) for side in sides))


def logit_errors(tensors: Sequence[Tensor], attentions: Sequence[Attention]) -> Tensor:
    """Standard deviations of the errors of each attention's logits [attentions], fp32.

    ``tensors``: of all operands, in order.
    """
    left, errors = iter(tensors), []
    for attention in attentions:
        sides = []
        for operands in (attention.query, attention.key):
            found = [_size([next(left) for _ in range(o.tensors)], o.width) for o in operands]
            sides.append([torch.stack(both).amax() for both in zip(*found, strict=True)])
        (query, query_step), (key, key_step) = sides
        spread = attention.factor / math.sqrt(12)
        errors.append(spread * torch.hypot(query * key_step, key * query_step))
    return torch.stack(errors)


def _size(tensors: Sequence[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """(at least the largest norm of a row, the largest step of its codes)."""
    if len(tensors) == 1:
        norms = torch.linalg.vector_norm(tensors[0], dim=-1, dtype=torch.float32)
        return norms.amax(), norms.new_zeros(())
    *planes, scale = tensors
    codes = [code.float() for plane in planes for code in _upper(plane)]
    squares = torch.stack([code.square().sum(-2, True) for code in codes]).sum(0)
    step = scale.float() / STEPS12
    group = planes[0].shape[-2] * 2
    norms = torch.sqrt(squares) * step * _UPPER * math.sqrt(max(1.0, width / group))
    return norms.amax(), step.amax()


def _upper(plane: Tensor) -> Iterator[Tensor]:
    """The signed bytes of a plane."""
    if plane.dtype == torch.uint8:
        yield (plane.to(torch.int16) ^ 0x80) - 0x80
    else:
        yield plane >> 8
        yield ((plane & 0xFF) ^ 0x80) - 0x80


def _watch_logits(seen: Tensor, tensors: list[Tensor], attentions: str, key: str) -> None:
    logits = logits_of(key)
    captured = seen.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or not logits.due():
        return
    try:
        logits.tell(logit_errors(tensors, list(_attentions(attentions))))
    except torch.OutOfMemoryError:  # another step will do
        log.debug("hot: no memory to look at attention's logits", exc_info=True)


_LIBRARY = torch.library.Library("hot", "FRAGMENT")
_LIBRARY.define("watch_logits(Tensor(a!) seen, Tensor[] tensors, str attentions, str key) -> ()")
_LIBRARY.impl("watch_logits", _watch_logits, "CompositeExplicitAutograd")
torch.library.register_fake("hot::watch_logits", lambda *_: None, lib=_LIBRARY)
