"""The definition itself against fp64 truth; floors follow from the formats, see each reason."""

from __future__ import annotations

import math

import pytest
import torch

from hot_compile.runtime import reference
from hot_compile.runtime.reference.arithmetic import hadamard, low_pass_order

hot = torch.ops.hot


def sqnr(truth: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantisation noise in dB."""
    noise = (approximation.double() - truth.double()).square().sum()
    return 10 * math.log10(float(truth.double().square().sum() / noise))


def sylvester() -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / 4


def transformed_rows(x: torch.Tensor) -> torch.Tensor:
    """fp64 HT16 along the columns, which must be a multiple of 16."""
    return (x.double().reshape(x.shape[0], -1, 16) @ sylvester().t()).reshape(x.shape)


def test_hadamard_is_orthonormal_sylvester():
    h = hadamard(torch.eye(16))
    assert torch.equal(h, sylvester().float())
    assert torch.equal(h @ h.t(), torch.eye(16))


def test_low_pass_order_counts_sequencies():
    order = low_pass_order()
    assert sorted(order) == list(range(16))
    changes = (sylvester().sign().diff(dim=1) != 0).sum(1)
    assert changes[order[0]] == 0
    h4 = sylvester()[::4, ::4].sign()  # rows of H4: signs over the slow index
    assert [int((row.diff() != 0).sum()) for row in h4] == [0, 3, 1, 2]


# A row of 768 Gaussians has absmax near 3.3 sigma. Nearest: noise step^2/12, so SQNR =
# 20 log10(qmax sqrt(12) / 3.3) = 42.5 dB (8 bits), 17.3 dB (4 bits); stochastic: twice the noise.
@pytest.mark.parametrize(
    ("bits", "stochastic", "floor"),
    [(8, False, 41.5), (8, True, 38.5), (4, False, 16.5), (4, True, 13.5)],
)
def test_quantize_rows_sqnr(bits, stochastic, floor):
    x = torch.randn(256, 768)
    q, scale = reference.quantize_rows(x, bits, True, stochastic)
    assert sqnr(transformed_rows(x), q * scale.unsqueeze(1)) > floor


def test_nearest_is_within_half_a_step():
    x = torch.randn(64, 320)
    q, scale = reference.quantize_rows(x, 4, True, False)
    error = (transformed_rows(x) - q * scale.unsqueeze(1).double()).abs()
    assert bool((error <= 0.5001 * scale.unsqueeze(1)).all())


def test_rank_16_keeps_the_product():
    """Full transforms of both operands cancel: what is left is 8-bit noise of two operands."""
    g, x = torch.randn(512, 48), torch.randn(512, 64)
    gq, gs = reference.quantize_columns(g, 16, 1, 8, True, True)
    xq, xs = reference.quantize_columns(x, 16, 1, 8, True, False)
    product = reference.scaled_int_mm(gq, xq, gs, xs, None, None, torch.float32)
    assert sqnr(g.double().t() @ x.double(), product) > 35


def test_rank_8_is_exact_on_what_it_keeps():
    """Rows that are constant within each group have all their energy in the first coefficient."""
    g, x = (torch.randn(20, cols).repeat_interleave(16, 0) for cols in (48, 64))
    gq, gs = reference.quantize_columns(g, 8, 1, 8, True, True)
    xq, xs = reference.quantize_columns(x, 8, 1, 8, True, False)
    product = reference.scaled_int_mm(gq, xq, gs, xs, None, None, torch.float32)
    assert sqnr(g.double().t() @ x.double(), product) > 35


def test_batch_groups_take_one_token_of_16_samples():
    samples, tokens = 32, 5
    x = torch.randn(samples, tokens, 8)
    grouped = x.reshape(2, 16, tokens, 8).transpose(1, 2).reshape(-1, 8)
    want = reference.quantize_columns(grouped, 8, 1, 8, True, False)
    got = reference.quantize_columns(x.reshape(-1, 8), 8, tokens, 8, True, False)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def _gaussian(born: str) -> torch.Tensor:
    x = torch.randn(2048, 2048)
    if born == "bf16":
        return x.to(torch.bfloat16).float()
    if born == "power-of-two scale":  # absmax 127/32: the quotient keeps x's low mantissa bits
        return x.clamp(-3.96875, 3.96875).index_fill(0, torch.tensor([0]), 3.96875)
    return x


@pytest.mark.parametrize("born", ["fp32", "bf16", "power-of-two scale"])
@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_unbiased(born, bits):
    """Mean error under 1e-3 of a step: 4 M samples give a standard error of 2e-4, and 11-bit dither
    a bias of 2.4e-4. Within a tenth of the step, 6e-4 and the same bias: 3e-3."""
    x = _gaussian(born)
    q, scale = hot.quantize_columns(x, 0, 1, bits, True, True)
    t = x.t().double() / scale.double().unsqueeze(1)
    error = q - t
    assert abs(float(error.mean())) < 1e-3
    tenth = ((t - t.floor()) * 10).long().clamp(0, 9).flatten()
    means = tenth.bincount(error.flatten(), minlength=10) / tenth.bincount(minlength=10)
    assert (means.abs() < 3e-3).all(), means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stochastic_rows_are_unbiased(dtype):
    x = torch.randn(2048, 2048).to(dtype)
    q, scale = hot.quantize_rows(x, 4, True, True)
    error = q - transformed_rows(x) / scale.double().unsqueeze(1)
    assert abs(float(error.mean())) < 1e-3


def test_rounding_is_uncorrelated_between_neighbours():
    """Errors of neighbours must not add up in the product: 2 M pairs, standard error 7e-4."""
    x = torch.randn(2048, 1024).to(torch.bfloat16).float()
    q, scale = hot.quantize_columns(x, 0, 1, 8, True, True)
    error = q - x.t().double() / scale.double().unsqueeze(1)
    for a, b in ((error[1:], error[:-1]), (error[:, 1:], error[:, :-1])):
        assert abs(float((a * b).mean() / error.square().mean())) < 4e-3


def test_non_finite_granules_stay_in_their_row_and_column():
    g, w = torch.randn(64, 64), torch.randn(64, 32)
    g[5, 7] = float("inf")
    q, scale = reference.quantize_rows(g, 4, True, True)
    wq, ws = reference.quantize_columns(w, 16, 1, 4, True, False)
    gx = reference.scaled_int_mm(q, wq, scale, ws, None, None, torch.float32)
    rows = gx.isfinite().all(1)
    assert not rows[5]
    assert int(rows.sum()) == 63
