"""BASELINES FOR COMPARISON ONLY, IN FAKE-QUANTISED ARITHMETIC: naive INT4, LUQ, LBP-WHT.

The methods that HOT's paper compares itself with (supplementary E, table 4), put into the same
graph by the same pipeline, so that their accuracy can be compared. They round values to their grids
but multiply in floating point, and keep x as it is: nothing is to be learnt here about speed or
memory.
Rounding of g_y is pseudo-stochastic by the same hash as everywhere (docs/adr/0002).

x [L, I], W [O, I], g_y [L, O]; g_x = g_y W [L, I], g_w = g_y^T x [O, I].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.config import Strategy
from hot_compile.runtime.reference.arithmetic import (
    TINY,
    dither,
    hadamard,
    low_pass_places,
    scale_of,
    transform_rows,
)
from hot_compile.runtime.reference.arithmetic import quantize as round_to_grid
from hot_compile.runtime.reference.sizes import HADAMARD_ORDER

_LUQ_LEVELS = 7
"""Powers of two that a sign and three exponent bits can tell apart, besides zero."""
_SAWB = (12.1, 12.2)
"""Coefficients of SAWB's 4-bit clipping value (Choi et al. 2019), which LUQ uses for x and W."""


def int4_per_tensor(t: Tensor, stochastic: bool) -> Tensor:
    """``t`` on a symmetric INT4 grid with one scale, in fp32."""
    t = t.float()
    scale, reciprocal = scale_of(t.abs().amax(), 4)
    return round_to_grid(t, reciprocal, 4, stochastic) * scale


def int4_sawb(t: Tensor) -> Tensor:
    """``t`` on a symmetric INT4 grid clipped at the statistics-aware value, rounded to nearest."""
    t = t.float()
    clip = _SAWB[0] * t.square().mean().sqrt() - _SAWB[1] * t.abs().mean()
    scale, reciprocal = scale_of(torch.minimum(clip.abs(), t.abs().amax()), 4)
    return round_to_grid(t, reciprocal, 4, False) * scale


def luq(g: Tensor) -> Tensor:
    """Logarithmic unbiased quantisation of g_y to 4 bits, in fp32 (Chmiel et al. 2023, section 4).

    Magnitudes are absmax / 2^6 ... absmax in powers of two. Below the smallest level a value
    becomes that level or zero, between two levels one of them, each with the probability that makes
    the expectation the value itself.
    """
    g = g.float()
    absmax = g.abs().amax()
    smallest = absmax / 2.0 ** (_LUQ_LEVELS - 1)
    ratio = torch.where(smallest >= TINY, g.abs() / smallest, torch.zeros_like(g))
    below = ratio.clamp(min=1.0).log2().floor().exp2()
    below = torch.where(ratio < 1.0, torch.zeros_like(below), below)
    gap = torch.where(ratio < 1.0, torch.ones_like(below), below)
    up = (ratio - below) / gap > 2.0 - dither(g)
    return g.sign() * (below + up * gap).clamp(max=2.0 ** (_LUQ_LEVELS - 1)) * smallest


def low_pass_expand(t: Tensor, rank: int, rows: int) -> Tensor:
    """Transpose of ``transform_rows``, of consecutive rows: [blocks * rank, C] back to ``rows``."""
    blocks = t.shape[0] // rank
    full = t.new_zeros(blocks, HADAMARD_ORDER, t.shape[1])
    kept = t.reshape(blocks, rank, t.shape[1]).unbind(1)
    for place, values in zip(low_pass_places(rank), kept, strict=True):
        full[:, place] = values
    back = hadamard(full.transpose(1, 2)).transpose(1, 2)
    return back.reshape(blocks * HADAMARD_ORDER, t.shape[1])[:rows]


@torch.library.custom_op("hot_baseline::grad_input", mutates_args=())
def grad_input(grad_output: Tensor, weight: Tensor, method: str, rank: int) -> Tensor:
    """g_x [L, I] by a baseline ``method``, in grad_output's dtype."""
    if method == Strategy.LBP_WHT:
        short = transform_rows(grad_output.float(), rank, 1) @ weight.float()
        result = low_pass_expand(short, rank, grad_output.shape[0])
    elif method == Strategy.LUQ:
        result = luq(grad_output) @ int4_sawb(weight)
    else:
        result = int4_per_tensor(grad_output, True) @ int4_per_tensor(weight, False)
    return result.to(grad_output.dtype).contiguous()


@torch.library.custom_op("hot_baseline::grad_weight", mutates_args=())
def grad_weight(grad_output: Tensor, x: Tensor, method: str, rank: int) -> Tensor:
    """g_w [O, I] by a baseline ``method``, in grad_output's dtype."""
    if method == Strategy.LBP_WHT:
        g, x = (transform_rows(t.float(), rank, 1) for t in (grad_output, x))
        result = g.t() @ x
    elif method == Strategy.LUQ:
        result = luq(grad_output).t() @ int4_sawb(x)
    else:
        result = int4_per_tensor(grad_output, True).t() @ int4_per_tensor(x, False)
    return result.to(grad_output.dtype).contiguous()


@grad_input.register_fake
def _(grad_output: Tensor, weight: Tensor, method: str, rank: int) -> Tensor:
    return grad_output.new_empty((grad_output.shape[0], weight.shape[1]))


@grad_weight.register_fake
def _(grad_output: Tensor, x: Tensor, method: str, rank: int) -> Tensor:
    return grad_output.new_empty((grad_output.shape[1], x.shape[1]))
