"""Every ISA's kernels give the reference's integers and scales, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hot_compile.runtime import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (1, 1000), (15, 33), (17, 16), (197, 100), (300, 64), (0, 5), (5, 0), (0, 0))


def spread(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian with columns of very different size."""
    return (torch.randn(rows, cols) * torch.logspace(-3, 3, max(cols, 1))[:cols]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_rows(provider, assert_same, shape, dtype):
    x = spread(*shape, dtype)
    for args in ((4, True, True), (8, True, False), (4, False, True), (8, False, False)):
        want = reference.quantize_rows(x, *args)
        assert_same(provider("quantize_rows", x, *args), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 3, 8, 16])
def test_quantize_columns(provider, assert_same, shape, dtype, rank):
    x = spread(*shape, dtype)
    for args in ((8, True, True), (4, True, False), (8, False, True), (4, False, False)):
        want = reference.quantize_columns(x, rank, 1, *args)
        assert_same(provider("quantize_columns", x, rank, 1, *args), want)


@pytest.mark.parametrize("rank", range(17))
def test_quantize_columns_every_rank(provider, assert_same, rank):
    x = spread(70, 20)
    want = reference.quantize_columns(x, rank, 1, 8, True, True)
    assert_same(provider("quantize_columns", x, rank, 1, 8, True, True), want)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 197), (8, 25), (16, 49), (33, 7), (64, 3)])
@pytest.mark.parametrize("rank", [5, 8])
def test_quantize_columns_grouped_across_the_batch(provider, assert_same, samples, tokens, rank):
    x = spread(samples * tokens, 36)
    for per_column in (True, False):
        want = reference.quantize_columns(x, rank, tokens, 8, per_column, True)
        assert_same(provider("quantize_columns", x, rank, tokens, 8, per_column, True), want)


@pytest.mark.parametrize(("rows", "cols"), [(9000, 3), (5000, 16), (4100, 70)])
@pytest.mark.parametrize("rank", [0, 8])
def test_quantize_columns_long(provider, assert_same, rows, cols, rank):
    """Too few columns for the threads, or strips too long for the cache: done in chunks."""
    x = spread(rows, cols)
    want = reference.quantize_columns(x, rank, 1, 8, True, True)
    assert_same(provider("quantize_columns", x, rank, 1, 8, True, True), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_grad(provider, assert_same, shape, dtype):
    g = spread(*shape, dtype)
    for args in ((4, True, 8, 1, True), (8, False, 0, 1, False)):
        assert_same(provider("quantize_grad", g, *args), reference.quantize_grad(g, *args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (128, 65), (129, 20), (250, 7), (1000, 130)])
def test_int4_storage(provider, assert_same, shape, dtype):
    x = spread(*shape, dtype) + 3
    want = reference.compress_int4(x)
    assert_same(provider("compress_int4", x), want)
    want = tuple(t.contiguous() for t in want)
    assert_same(provider("expand_int4", *want), reference.expand_int4(*want))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("mnk", [(1, 1, 32), (17, 33, 64), (40, 1, 96), (1, 50, 32), (3, 4, 0)])
def test_scaled_int_mm(provider, assert_same, mnk, out_dtype):
    m, n, k = mnk
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(m) / 100, torch.rand(n) / 100
    for terms in ((None, None), (torch.randn(m), torch.randn(n))):
        args = (a, b, *scales, *terms, out_dtype)
        assert_same(provider("scaled_int_mm", *args), reference.scaled_int_mm(*args))


@pytest.mark.parametrize("mn", [(0, 4), (4, 0), (0, 0)])
def test_scaled_int_mm_of_nothing(provider, assert_same, mn):
    a, b = (torch.zeros(size, 32, dtype=torch.int8) for size in mn)
    args = (a, b, torch.ones(mn[0]), torch.ones(mn[1]), None, None, torch.float32)
    assert_same(provider("scaled_int_mm", *args), reference.scaled_int_mm(*args))


def test_scaled_int_mm_does_not_overflow(provider, assert_same):
    """K of 270,000 extreme products exceeds int32; the sum must still be exact."""
    k = 270_016
    a = torch.full((3, k), 127, dtype=torch.int8)
    b = torch.full((5, k), -127, dtype=torch.int8)
    b[1] = -128
    for dtype in (torch.float32, torch.bfloat16):
        args = (a, b, torch.ones(3), torch.ones(5), None, None, dtype)
        assert_same(provider("scaled_int_mm", *args), reference.scaled_int_mm(*args))


SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3.4e38, -0.0, 2.0**-117)


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_special_values(provider, assert_same, value, everywhere):
    """inf, NaN, denormals, overflowing transforms and all-zero granules."""
    x = torch.full((150, 40), value) if everywhere else torch.randn(150, 40)
    x[3, 5] = x[140, 39] = value
    x[:, 7] = x[9] = 0
    calls = [("quantize_rows", each, st) for each in (True, False) for st in (True, False)]
    for name, each, stochastic in calls:
        want = reference.quantize_rows(x, 4, each, stochastic)
        assert_same(provider(name, x, 4, each, stochastic), want)
        for rank in (0, 8):
            want = reference.quantize_columns(x, rank, 1, 8, each, stochastic)
            assert_same(provider("quantize_columns", x, rank, 1, 8, each, stochastic), want)
    want = tuple(t.contiguous() for t in reference.compress_int4(x))
    assert_same(provider("compress_int4", x), want)
    assert_same(provider("expand_int4", *want), reference.expand_int4(*want))


def test_power_of_two_scales(provider, assert_same):
    """absmax = qmax 2^k: products by the reciprocal are exact and rounding meets ties."""
    x = torch.randint(-14, 15, (64, 48)).float() / 2
    x[:, 0] = 7
    for stochastic in (True, False):
        want = reference.quantize_columns(x, 0, 1, 4, True, stochastic)
        assert_same(provider("quantize_columns", x, 0, 1, 4, True, stochastic), want)


def test_non_contiguous_inputs(provider, assert_same):
    x = torch.randn(50, 90).t()[::2]
    assert_same(
        provider("quantize_rows", x, 4, True, True), reference.quantize_rows(x, 4, True, True)
    )
    want = reference.quantize_columns(x, 8, 1, 8, True, True)
    assert_same(provider("quantize_columns", x, 8, 1, 8, True, True), want)
    assert_same(provider("compress_int4", x), reference.compress_int4(x))
    packed = reference.compress_int4(x)
    expanded = tuple(t.t().contiguous().t() for t in packed)
    assert_same(provider("expand_int4", *expanded), reference.expand_int4(*packed))
    a = torch.randint(-127, 128, (64, 10), dtype=torch.int8).t()
    args = (a, a, torch.rand(20)[::2], torch.rand(10), None, None, torch.float32)
    assert_same(provider("scaled_int_mm", *args), reference.scaled_int_mm(*args))


def test_threads_change_nothing(assert_same):
    before = torch.get_num_threads()
    x = torch.randn(700, 200)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(torch.ops.hot.quantize_grad(x, 4, True, 8, 1, True))
    torch.set_num_threads(before)
    assert_same(*results)


@pytest.mark.skipif(sys.platform != "linux", reason="MALLOC_PERTURB_ is glibc's")
def test_every_byte_is_written():
    """Some of the tests above, with fresh memory full of 0x5a instead of whatever was there."""
    chosen = "every_rank or int4_storage or special_values or non_contiguous or of_nothing"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        __file__,
    ]
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
