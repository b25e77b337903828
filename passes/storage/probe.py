"""Does a chain of pointwise operators tolerate a rounded argument? Found by trying.

At compile time a chain is evaluated on samples of many scales, and on the same samples as a scheme
would restore them (by the very nodes that ``pack`` and ``unpack`` write). It tolerates the scheme
if what it makes errs little at every scale: a derivative with a pole, a steep or a periodic
function fails that, a smooth activation does not.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.schemes import Scheme, Unit
from hot_compile.passes.storage.pack import pack, unpack

_WIDTH = 256
"""Elements of a row; each row has one scale of its own."""
_SCALES = tuple(4.0**k for k in range(-8, 9))
_SHIFTS = (0.0, 1.0, -1.0)
_FAR_SHIFTS = (4.0, -4.0, 18.0, -18.0)
_NARROW = 4.0
_OUTLIER = 100.0
_OUTLIERS = slice(5, None, 128)
USUAL = 0.12
"""Largest relative error where values lie around zero: a cosine of 0.993."""
CENTRED = 0.2
"""The same where values are coded by their distance from a channel's mean, which need not be where
a function bends: 0.98."""
_WITH_OUTLIERS = 0.2
"""The same of ordinary elements beside an outlier a hundred times as large: 0.98."""
_FAR = 0.3
"""The same where all values lie deviations to one side of zero, four or eighteen (a feature by
itself, at the end of a sigmoid): 0.95. Activations are flat there, and what is left of their
derivative is small."""
_HUGE = 16.0
"""Deviations beyond this are judged as the far ones are."""
FOUR_BITS = 1.0
"""The same of INT4: it is the user's own choice, but for poles and what it knows nothing of."""
_FEW = 8
"""Elements within a mask, of a row of ``_WIDTH``, that are too few to be judged by themselves.
Those that are almost zero do not count."""
_DEAD, _FLAT, _FLAT_BESIDE = 1e-3, 0.02, 0.05
"""Rows whose results are this small, against the largest at this or a smaller scale, are not
judged; ``_FLAT`` holds for the far ones, and ``_FLAT_BESIDE`` beside outliers."""


@lru_cache(maxsize=16)
def samples(dtype: torch.dtype) -> Tensor:
    """[rows, elements]: normal at every scale and shift; with outliers; spread wide."""
    noise, narrow = (torch.Generator("cpu").manual_seed(seed) for seed in (0, 1))

    def normal(source: torch.Generator = noise) -> Tensor:
        return torch.randn(_WIDTH, generator=source, device="cpu", dtype=torch.float32)

    rows = []
    for scale in _SCALES:
        for shift in (*_SHIFTS, *_FAR_SHIFTS):
            source = narrow if abs(shift) > _NARROW else noise
            rows.append((normal(source) + shift) * scale)
        outliers = normal() * scale
        outliers[_OUTLIERS] *= _OUTLIER
        wide = normal()
        rows += [outliers, wide.sign() * (4 * wide).exp() * scale]
    return torch.stack(rows).to(dtype)


_KINDS = len(_SHIFTS) + len(_FAR_SHIFTS) + 2


def restored(values: Tensor, scheme: Scheme) -> Tensor:
    """``values`` [rows, elements] as they come back from ``scheme``, each row by itself."""
    if scheme.spec.unit is Unit.CENTRED_ROW:
        return torch.stack([_among_its_like(row, scheme) for row in values])
    by_channel = scheme.spec.unit is Unit.CHANNEL
    given = values.t().contiguous() if by_channel else values
    back = _round_trip(scheme, given.dtype, tuple(given.shape))(given)
    return back.t() if by_channel else back


def _among_its_like(row: Tensor, scheme: Scheme) -> Tensor:
    """``row`` as it comes back from a tensor whose columns all have its mean: it and its mirror."""
    rows = torch.stack([row, (2 * row.float().mean() - row).to(row.dtype)])
    return _round_trip(scheme, rows.dtype, tuple(rows.shape))(rows)[0]


@lru_cache(maxsize=64)
def _round_trip(scheme: Scheme, dtype: torch.dtype, shape: tuple[int, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.empty(shape, dtype=dtype, device="cpu"))
    output = graph.output(())
    emit = Emitter(graph, output, x)
    output.args = (unpack(emit, pack(emit, x, scheme), x.meta["val"], scheme),)
    return fx.GraphModule({}, graph)


def verdict(
    exact: Tensor,
    rounded: Tensor,
    x: Tensor,
    limit: float = USUAL,
    within: Tensor | None = None,
) -> str:
    """Why ``rounded`` is too far from ``exact``, '' if it is not.

    Args:
        exact, rounded: what the chain makes of ``x`` and of ``x`` as restored, [rows, elements].
        x: the samples. limit: relative error allowed around zero.
        within: a mask [rows, elements]: outside of it nothing counts, nor do rows with few
            elements inside; a part of all elements may err as those far from zero.
    """
    want, got = exact.double(), rounded.double()
    if within is not None:
        part = want.where(within, 0.0)
        within = within & (_alive(part) >= _FEW)
        want, got, limit = part.where(within, 0.0), got.where(within, 0.0), max(limit, _FAR)
    fine = want.isfinite().all(1) & x.double().isfinite().all(1)
    inside = want.isfinite() & (x.double().abs() < _HUGE)  # beyond, it may be an overflow
    if not (got.isfinite() | ~(inside | fine.unsqueeze(1))).all():
        return "it has a pole, or an edge of its domain, that a rounded value may hit"
    kind = torch.arange(len(x), device="cpu") % _KINDS
    ordinary = torch.ones(_WIDTH, dtype=torch.bool, device="cpu")
    ordinary[_OUTLIERS] = False
    error = _relative(got[:, ordinary], want[:, ordinary])
    size = want[:, ordinary].square().mean(1).sqrt()
    size = torch.where(fine, size, 0.0)
    peak = want.abs().amax(1).where(fine, 0.0).view(-1, _KINDS)[:, : len(_SHIFTS)]
    peak = peak.amax(1).cummax(0).values
    peak = peak.repeat_interleave(_KINDS)
    alive, steep = fine & (size > _DEAD * peak), fine & (size > _FLAT * peak)
    beside = fine & (size > _FLAT_BESIDE * peak) & (kind == _KINDS - 2)
    huge = torch.tensor(_SCALES, device="cpu").repeat_interleave(_KINDS) > _HUGE
    usual, far = kind < len(_SHIFTS), (kind >= len(_SHIFTS)) & (kind < _KINDS - 2)
    judged = [
        (alive & usual & ~huge, limit, "around zero"),
        (alive & usual & huge, max(limit, _FAR), "where values are large"),
        (steep & far, _FAR, "far from zero"),
        (beside, _WITH_OUTLIERS, "beside outliers"),
    ]
    for rows, most, where in judged[:2] if limit == FOUR_BITS else judged:
        worst = _largest(error[rows])
        if worst > most:
            return f"steep or periodic: {where} it turns rounding into an error of {worst:.0%}"
    return ""


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """Norm of each row's error over the row's norm; 0 where neither is anything."""
    error, norm = (got - want).norm(dim=1), want.norm(dim=1)
    return torch.where(error == 0, 0.0, error / norm.clamp_min(2.0**-140))


def _alive(values: Tensor) -> Tensor:
    """How many elements of each row [rows, elements] are no less than a thousandth of its largest,
    [rows, 1]."""
    size = values.abs()
    return ((size >= _DEAD * size.amax(1, keepdim=True)) & (size > 0)).sum(1, keepdim=True)


def _largest(values: Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.max()) if values.numel() else -math.inf
