"""What one quantisation of grad_output for both products promises, by its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_properties import matrices, quick
from test_providers import check_sums

hot = torch.ops.hot


@quick
@given(x=matrices(), rank=st.sampled_from((0, 8)), tokens=st.integers(1, 9))
def test_sums_of_any_matrix(x, rank, tokens):
    x = x[: x.shape[0] // tokens * tokens]
    check_sums(hot.quantize_one_read(x, rank, tokens, True)[-1], x)


def values_of(q: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return q[:, : column.shape[0]].double() * row.double()[:, None] * column.double()


@pytest.mark.parametrize("born", ["fp32", "bf16", "power of two"])
def test_rounding_is_unbiased_and_uncorrelated(born):
    """Mean error under 1e-3 of a step: 4 M samples give a standard error of 2e-4. Within a tenth of
    the step, 6e-4, and rounding to 1/256 first may shift an edge: 3e-3."""
    x = torch.randn(2048, 2048)
    if born == "bf16":
        x = x.bfloat16().float()
    if born == "power of two":  # scales 2^k: quotients have the values' few mantissa bits
        x = x.bfloat16().float().clamp(-3.96875, 3.96875)
        x[:, 0] = 3.96875
    q, scale, _, _, _, equal, _ = hot.quantize_one_read(x, 0, 1)
    t = x.double() / scale.double()[:, None] / equal.double()
    error = q - t
    assert abs(float(error.mean())) < 1e-3
    tenth = ((t - t.floor()) * 10).long().clamp(0, 9)
    for part in range(10):
        assert abs(float(error[tenth == part].mean())) < 4e-3, part
    for a, b in ((error[1:], error[:-1]), (error[:, 1:], error[:, :-1])):
        assert abs(float((a * b).mean() / error.square().mean())) < 4e-3


def test_what_lies_on_the_grid_stays():
    x = torch.randint(-127, 128, (64, 96)).float()
    x[:, 0] = 127
    q, scale, col_q, fold, _, equal, _ = hot.quantize_one_read(x, 0, 1)
    assert torch.equal(values_of(q, scale, equal), x.double())
    assert torch.equal(values_of(col_q.t().contiguous(), fold, equal), x.double())


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(g_x, g_w with x in 8 bits) as a layer's backward makes them."""
    row_q, row_scale, col_q, fold, peak, equal, _ = hot.quantize_one_read(g, 0, 1)
    w_q, w_scale = hot.quantize_weight(w, equal, False)
    x_q, x_scale = hot.rescale_int8(*hot.compress_int8(x, 0, 1), fold, peak)
    g_x = hot.scaled_int_mm(row_q, w_q, row_scale, w_scale, None, None, torch.float32)
    return g_x, hot.scaled_int_mm(col_q, x_q, equal, x_scale, None, None, torch.float32)


@pytest.mark.parametrize("kind", ["gaussian", "small columns", "one huge column", "few rows"])
def test_gradients(kind):
    """Errors of 8 bits, in every part: columns far smaller than others must keep their precision,
    or a fused qkv would lose its q and k; rows without gradient must not drown the rest."""
    g, x, w = torch.randn(1600, 192), torch.randn(1600, 64), torch.randn(192, 64)
    small = slice(0, 64)
    if kind == "small columns":
        g[:, small] *= 0.01
    if kind == "one huge column":
        g[:, 100] *= 100
    if kind == "few rows":
        g *= 1e-3
        g[::50] *= 1e3
    g_x, g_w = gradients(g, x, w)
    exact_x, exact_w = g.double() @ w.double(), g.double().t() @ x.double()
    assert relative(g_x, exact_x) < 0.05
    assert relative(g_w[small], exact_w[small]) < 0.05
    assert relative(g_w, exact_w) < 0.05


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("share", [1e-1, 1e-2, 1e-3])
def test_many_rows_of_little_gradient_count(stored, share):
    """As most tokens of a language model: what they agree upon must not be rounded away."""
    rows = 4096
    g, x = share * (1 + torch.rand(rows, 32)), 1 + torch.rand(rows, 48)
    g[::256] = torch.randn(16, 32)
    _, _, col_q, fold, peak, equal, _ = hot.quantize_one_read(g, 0, 1)
    if stored == "int8":
        x_q, x_scale = hot.rescale_int8(*hot.compress_int8(x, 0, 1), fold, peak)
    else:
        x_q, x_scale = hot.rescale_int4(*hot.compress_int4(x), fold, peak)
    small = torch.ones(rows, dtype=torch.bool)
    small[::256] = False
    got = (col_q.double() * equal[:, None])[:, small] @ (x_q.double() * x_scale[:, None]).t()[small]
    exact = g[small].double().t() @ x[small].double()
    assert relative(got, exact) < (0.05 if share > 1e-3 else 0.2)
    assert 0.98 < float((got * exact).sum() / exact.square().sum()) < 1.02


def test_half_rank_is_exact_on_what_it_keeps():
    """Rows that are constant within each unit have all their energy in the first coefficient."""
    g, x = (torch.randn(40, cols).repeat_interleave(16, 0) for cols in (48, 64))
    _, _, col_q, fold, peak, equal, _ = hot.quantize_one_read(g, 8, 1)
    x_q, x_scale = hot.rescale_int8(*hot.compress_int8(x, 8, 1), fold, peak)
    got = hot.scaled_int_mm(col_q, x_q, equal, x_scale, None, None, torch.float32)
    assert relative(got, g.double().t() @ x.double()) < 0.02


def test_non_finite_gradients_are_seen():
    g, x, w = torch.randn(64, 64), torch.randn(64, 32), torch.randn(64, 32)
    g[5, 7] = float("inf")
    g_x, g_w = gradients(g, x, w)
    rows = g_x.isfinite().all(1)
    assert not rows[5]
    assert int(rows.sum()) == 63
    assert not g_w.isfinite().any()
