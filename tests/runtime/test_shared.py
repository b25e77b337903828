"""The operators of one shared quantisation: every ISA against the definition, and its promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cpu_matches_reference import DTYPES, SHAPES, SPECIAL, spread
from test_properties import matrices, quick

from hot_compile.runtime import reference, reference_shared

hot = torch.ops.hot


def check_sums(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Add up to the sum over rows, within what adding floats one by one may lose."""
    want, lost = x.double().sum(0), x.double().abs().sum(0) * x.shape[0] * 2**-24
    lost += x.shape[0] * 2.0**-126  # lifting may take bf16 below its smallest number
    got = sums.cpu().double().sum(0)
    beyond = ~want.isfinite() | (lost >= 2.0**103)  # partial sums beyond the largest float
    assert bool((((got - want).abs() <= lost) | (beyond & ~got.isfinite())).all())


def check_all(call, assert_same, x: torch.Tensor, rank: int, tokens: int) -> None:
    """Every operator by ``call(name, *args)`` on ``x``, as grad_output, weight and x alike."""

    def check(name: str, *args) -> tuple[torch.Tensor, ...]:
        want = getattr(reference_shared, name)(*args)
        assert_same(call(name, *args), want)
        return want

    *_, fold, peak, equal, _ = check("quantize_shared", x, rank, tokens)
    check_sums(call("quantize_shared", x, rank, tokens, True)[-1], x)
    check("quantize_weight", x, torch.rand(x.shape[0]), False)
    check("quantize_weight", x, equal, True)
    check("rescale_int8", *check("compress_int8", x, rank, tokens), fold, peak)
    if rank == 0:
        stored = tuple(t.contiguous() for t in reference.compress_int4(x))
        check("rescale_int4", *stored, fold, peak)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (128, 65), (129, 20), (1000, 130), (70, 700)])
@pytest.mark.parametrize("rank", [0, 8])
def test_shapes(provider, assert_same, shape, dtype, rank):
    check_all(provider, assert_same, spread(*shape, dtype), rank, 1)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 197), (8, 25), (16, 49), (33, 7), (64, 3)])
def test_grouped_across_the_batch(provider, assert_same, samples, tokens):
    check_all(provider, assert_same, spread(samples * tokens, 36), 8, tokens)


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("rank", [0, 8])
def test_special_values(provider, assert_same, value, everywhere, rank):
    x = torch.full((150, 40), value) if everywhere else torch.randn(150, 40)
    x[3, 5] = x[140, 39] = value
    x[:, 7] = x[9] = 0
    check_all(provider, assert_same, x, rank, 1)


@quick
@given(x=matrices(), rank=st.sampled_from((0, 8)), tokens=st.integers(1, 9))
def test_any_matrix(assert_same, x, rank, tokens):
    x = x[: x.shape[0] // tokens * tokens]
    check_all(lambda name, *args: getattr(hot, name)(*args), assert_same, x, rank, tokens)


def test_layouts_and_threads_change_nothing(assert_same):
    x = torch.randn(300, 90).t()[::2]
    check_all(lambda name, *args: getattr(hot, name)(*args), assert_same, x, 8, 5)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(hot.quantize_shared(x, 0, 1))
    torch.set_num_threads(before)
    assert_same(*results)


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
    q, scale, _, _, _, equal, _ = hot.quantize_shared(x, 0, 1)
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
    q, scale, col_q, fold, _, equal, _ = hot.quantize_shared(x, 0, 1)
    assert torch.equal(values_of(q, scale, equal), x.double())
    assert torch.equal(values_of(col_q.t().contiguous(), fold, equal), x.double())


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(g_x, g_w with x in 8 bits) as a layer's backward makes them."""
    row_q, row_scale, col_q, fold, peak, equal, _ = hot.quantize_shared(g, 0, 1)
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


def test_half_rank_is_exact_on_what_it_keeps():
    """Rows that are constant within each unit have all their energy in the first coefficient."""
    g, x = (torch.randn(40, cols).repeat_interleave(16, 0) for cols in (48, 64))
    _, _, col_q, fold, peak, equal, _ = hot.quantize_shared(g, 8, 1)
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
