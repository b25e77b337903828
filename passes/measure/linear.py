"""How far each strategy's gradients of one layer are from exact, by the operators that would run.

A layer is y = x W^T with x [L, I], W [O, I]; g_y [L, O]. All results are 0-d fp32 tensors on the
layer's device: nothing here waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hot_compile.config import Rows, Strategy
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.passes.layers.strategies import STRATEGIES, How
from hot_compile.passes.profile.profile import PLAIN, ROTATED, gw_variant, gx_variant
from hot_compile.runtime.reference.arithmetic import quantize, scale_of, transform_rows
from hot_compile.runtime.reference.sizes import CONTRACT_ALIGN, HADAMARD_ORDER

_BLOCK, _BLOCKS = 2**18, 16
"""Rows are gone through in blocks of so many values, or in so many blocks if these are larger."""
VARIES = 1e-3
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
    """g_w [O, I] in fp32 by ``strategy``."""
    spec = STRATEGIES[strategy]
    how = How(
        gx=False,
        per_channel=per_channel,
        rank=rank if spec.low_rank else 0,
        tokens=tokens,
    )
    result = spec(g, x, g, how).gw  # without g_x nobody reads the weight
    assert result is not None
    return result


def compare(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """(relative error, cosine) of ``got`` against ``want``, both fp32."""
    norm = want.norm()
    return relative(torch.dist(got, want) / norm, got.norm() / norm)


def compare_product(got: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``compare(got, a @ b)`` in fp32, by blocks of rows: the product is never there as a whole."""
    return _compare_blocks(
        got, a, b.float(), torch.zeros((), dtype=torch.float32, device=got.device)
    )


def _compare_blocks(got: Tensor, a: Tensor, b: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """The same of what is left when each row has lost ``common``."""
    errors, wants, gots = [], [], []
    for ours, rows in zip(_blocks(got), _blocks(a, like=got), strict=True):
        want = rows.float() @ b
        errors.append(torch.dist(ours, want))
        wants.append(want.sub_(common).norm())
        gots.append((ours - common).norm())
    error, norm, length = (torch.stack(norms).norm() for norms in (errors, wants, gots))
    return relative(error / norm, length / norm)


def relative(error: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(relative error, cosine) out of the error and the length, both relative to exact's."""
    return error, (1 + length**2 - error**2) / (2 * length)


def _blocks(t: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows of ``t`` in at most 16 blocks of whole groups; as many rows each as of ``like``."""
    like = t if like is None else like
    least = -(-_BLOCK // max(1, like.shape[1]))
    rows = max(least, -(-like.shape[0] // _BLOCKS))
    return t.split(-(-rows // HADAMARD_ORDER) * HADAMARD_ORDER)


def exact_grad_weight(g: Tensor, x: Tensor) -> Tensor:
    """g_w = g_y^T x [O, I] in fp32, without fp32 copies of both as a whole."""
    want = torch.zeros(g.shape[1], x.shape[1], dtype=torch.float32, device=g.device)
    for rows, of_x in zip(_blocks(g), _blocks(x, like=g), strict=True):
        want.addmm_(rows.float().t(), of_x.float())
    return want


def grad_input_measures(g: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{variant: (error, cosine)} of g_x for every width and granule."""
    return {
        gx_variant(bits, per_channel): compare_product(
            quantised_grad_input(g, weight, bits, per_channel), g, weight
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
    want = exact_grad_weight(g, x)
    found = {}
    for strategy, spec in STRATEGIES.items():
        if not spec.quantises_x or strategy is Strategy.GW_ONLY:  # whose g_w is int8's
            continue
        groups = {Rows.CONSECUTIVE: 1}
        if spec.grouped and tokens is not None:
            groups[Rows.BATCH] = tokens
        for rows, length in groups.items():
            for per_channel in (True, False):
                got = quantised_grad_weight(g, x, strategy, rank, length, per_channel)
                found[gw_variant(strategy, rows, per_channel)] = compare(got, want)
                del got  # before the next is made
    return found


def forward_measures(x: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """{variant: (error, cosine)} of y = x W^T on INT8, as far as y varies over the rows.

    What all rows have in common, as an outlying channel with an offset gives, would hide an error
    in what tells them apart. Where nothing does, of y itself.
    """
    transposed = weight.float().t()
    common = torch.stack([rows.float().sum(0) for rows in _blocks(x)]).sum(0) / len(x) @ transposed
    varies = [(rows.float() @ transposed).sub_(common).norm() for rows in _blocks(x)]
    fixed = common.norm() * len(x) ** 0.5
    common = torch.where(torch.stack(varies).norm() > VARIES * fixed, common, 0.0)
    found = {}
    aligned = x.shape[1] % CONTRACT_ALIGN == 0  # else operands of the product want padding
    for variant in (ROTATED, PLAIN) if aligned else (ROTATED,):
        got = int8_product(x, weight, None, None, Form(variant == ROTATED), torch.float32)
        found[variant] = _compare_blocks(got, x, transposed, common)
        del got
    return found


def forward_loss(g: Tensor, x: Tensor, weight: Tensor, rotated: bool) -> Tensor:
    """What an INT8 y does to the loss, to first order: the sum of (y's error * g_y)^2.

    Outputs of all layers are about as far off. Which of them matter g_y tells.
    """
    got = int8_product(x, weight, None, None, Form(rotated), torch.float32)
    transposed, lost = weight.float().t(), []
    for ours, rows, of_g in zip(
        _blocks(got), _blocks(x, like=got), _blocks(g, like=got), strict=True
    ):
        lost.append(ours.sub_(rows.float() @ transposed).mul_(of_g).norm())
    return torch.stack(lost).norm().square()


def granule_errors(g: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(per-token, per-tensor) relative L2 error of g_y as g_w reads it: HLA rows in INT8.

    The quantity of the paper's LQS (section 4.3): per token is worth a slower product only where
    it cuts this by more than half.
    """
    blocks = _blocks(g)
    rows = [transform_rows(block.float(), rank, 1).abs_().amax(1) for block in blocks]
    largest = torch.stack([block.amax() for block in rows]).amax()
    norms: list[Tensor] = []
    token: list[Tensor] = []
    tensor: list[Tensor] = []
    for block, absmax in zip(blocks, rows, strict=True):
        values = transform_rows(block.float(), rank, 1)
        norms.append(values.norm())
        for errors, peaks in ((token, absmax), (tensor, largest.expand_as(absmax))):
            scale, reciprocal = scale_of(peaks, 8)
            q = quantize(values, reciprocal.unsqueeze(1), 8, True)
            errors.append(torch.dist(q * scale.unsqueeze(1), values))
    norm = torch.stack(norms).norm()
    return torch.stack(token).norm() / norm, torch.stack(tensor).norm() / norm
