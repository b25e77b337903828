"""How far each strategy's gradients of one layer are from exact, by the operators that would run.

A layer is y = x W^T with x [L, I], W [O, I]; g_y [L, O]. All results are 0-d fp32 tensors on the
layer's device: nothing here waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.config import Rows, Strategy
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.passes.layers.baselines import low_pass
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.passes.measure.profile import PLAIN, ROTATED, gw_variant, gx_variant
from hot_compile.runtime.reference.arithmetic import quantize, scale_of
from hot_compile.runtime.reference.sizes import CONTRACT_ALIGN

_VARIES = 1e-3
"""Rows that differ by less of their norm are taken as one and the same."""


def quantised_grad_input(
    g: Tensor, weight: Tensor, bits: int, per_channel: bool, per_token: bool = False
) -> Tensor:
    """g_x [L, I] in fp32 by HQ, as the rewritten graph computes it."""
    per_row = per_channel or per_token
    how = How(gw=False, gx_bits=bits, per_row=per_row, per_channel=per_channel)
    result = STRATEGIES[Strategy.GX_ONLY].gradients(g, (), weight, how).gx
    assert result is not None
    return result


def quantised_grad_weight(
    g: Tensor, x: Tensor, strategy: Strategy, rank: int, tokens: int, per_channel: bool
) -> Tensor:
    """g_w [O, I] in fp32 by ``strategy``, x kept as small as it may keep it."""
    spec = STRATEGIES[strategy]
    how = How(
        gx=False,
        per_channel=per_channel,
        rank=rank if spec.low_rank else 0,
        tokens=tokens,
        stored_bits=spec.stored_bits,
    )
    result = spec(g, x, g, how).gw  # without g_x nobody reads the weight
    assert result is not None
    return result


def compare(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """(relative error, cosine) of ``got`` against ``want``, both fp32."""
    norm = want.norm()
    return (got - want).norm() / norm, (got * want).sum() / (got.norm() * norm)


def grad_input_measures(g: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{variant: (error, cosine)} of g_x for every width and granule."""
    want = g.float() @ weight.float()
    return {
        gx_variant(bits, per_channel): compare(
            quantised_grad_input(g, weight, bits, per_channel), want
        )
        for bits in (4, 8)
        for per_channel in (True, False)
    }


def grad_weight_measures(
    g: Tensor, x: Tensor, rank: int, tokens: int | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """{variant: (error, cosine)} of g_w for every strategy, grouping and granule.

    ``tokens``: rows of one sample, or None where rows cannot be grouped across the batch.
    """
    want = g.float().t() @ x.float()
    found = {}
    for strategy, spec in STRATEGIES.items():
        if not spec.quantises_x:
            continue
        groups = {Rows.CONSECUTIVE: 1}
        if spec.grouped and tokens is not None:
            groups[Rows.BATCH] = tokens
        for rows, length in groups.items():
            for per_channel in (True, False):
                got = quantised_grad_weight(g, x, strategy, rank, length, per_channel)
                found[gw_variant(strategy, rows, per_channel)] = compare(got, want)
    return found


def forward_measures(x: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{variant: (error, cosine)} of y = x W^T on INT8, as far as y varies over the rows.

    What all rows have in common, as an outlying channel with an offset gives, would hide an error
    in what tells them apart. Where nothing does, of y itself.
    """
    want = x.float() @ weight.float().t()
    common = want.mean(0)
    varies = (want - common).norm() > _VARIES * want.norm()
    common = torch.where(varies, common, 0.0)
    found = {}
    aligned = x.shape[1] % CONTRACT_ALIGN == 0  # else operands of the product want padding
    for variant in (ROTATED, PLAIN) if aligned else (ROTATED,):
        got = int8_product(x, weight, None, None, Form(variant == ROTATED), torch.float32)
        found[variant] = compare(got - common, want - common)
    return found


def granule_errors(g: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(per-token, per-tensor) relative L2 error of g_y as g_w reads it: HLA rows in INT8.

    The quantity of the paper's LQS (section 4.3): per token is worth a slower product only where
    it cuts this by more than half.
    """
    values = low_pass(g.float(), rank)
    rows = values.abs().amax(1)
    errors = []
    for absmax in (rows, rows.amax().expand_as(rows)):
        scale, reciprocal = scale_of(absmax, 8)
        q = quantize(values, reciprocal.unsqueeze(1), 8, True)
        errors.append((q * scale.unsqueeze(1) - values).norm() / values.norm())
    return errors[0], errors[1]


def tensor_stats(t: Tensor, rank: int) -> dict[str, Tensor]:
    """The fields of ``TensorStats`` for a matrix whose rows HLA would group consecutively."""
    t = t.float()
    size, rms = t.abs(), t.square().mean().sqrt()
    rows, columns = size.amax(1), size.amax(0)
    energy = t.square().sum()
    return {
        "row_peak": rows.amax() / _positive_median(rows),
        "column_peak": columns.amax() / _positive_median(columns),
        "absmax": rows.amax() / rms,
        "kurtosis": (t / rms).pow(4).mean(),
        "hla_energy": low_pass(t, rank).square().sum() / energy,
    }


def _positive_median(absmax: Tensor) -> Tensor:
    """Median, but never 0: rows of padding or of masked tokens are all zero."""
    return torch.maximum(absmax.median(), absmax.amax() * 1e-6)
