"""A tensor's norm, and its distance from another, out of few numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 16381
"""Most numbers kept of a tensor: norms and distances are right to 0.6 % (one deviation). A prime:
so one channel of a matrix does not fall into few sums."""
_CHUNK = 8 * SIZE
_STEP = 4099
"""By how much the signs of one chunk are shifted against those of the one before."""


def sketch(values: Tensor) -> Tensor:
    """At most ``SIZE`` fp32 numbers in place of ``values``; these themselves if they are no more.

    Else every value, with a random sign, is added to one of ``SIZE`` sums. That is linear, and
    keeps squared norms on average: two tensors' sketches are as far apart as they are.
    """
    flat = values.detach().reshape(-1)
    if flat.numel() <= SIZE:
        return flat.float().clone()
    signs = _signs(flat.device)
    sums = torch.zeros(SIZE, dtype=torch.float32, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK)):
        signed = chunk.float() * signs.narrow(0, number * _STEP % _CHUNK, chunk.numel())
        missing = -chunk.numel() % SIZE
        sums += F.pad(signed, (0, missing)).view(-1, SIZE).sum(0)
    return sums


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    """1 and -1, [2 * _CHUNK] fp32: the same in every process, the second half as the first."""
    chance = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (_CHUNK,), generator=chance, device="cpu")
    return (2 * signs - 1).float().repeat(2).to(device)
