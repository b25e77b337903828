"""Every provider's integers and scales are the definition's, bit for bit, in every layout."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from conftest import POISON, on_cuda
from samples import DTYPES, LAYOUTS, SHAPES, SPECIAL, layouts, sample, strange

from hot_compile.runtime import reference

FLAGS = list(itertools.product((4, 8), (True, False), (True, False)))
GROUPS = [(1, 197), (3, 5), (8, 25), (16, 7), (16, 49), (33, 7), (33, 11), (64, 3)]
EXPONENTS = (-126, -117, -116, -115, -101, -100, -99, -92, -91, -60, 60, 99, 120)


def check_sums(sums, x):
    """Add up to the sum over rows, within what adding floats one by one may lose."""
    want, lost = x.double().sum(0), x.double().abs().sum(0) * x.shape[0] * 2**-24
    lost += x.shape[0] * 2.0**-126  # lifting may take bf16 below its smallest number
    got = sums.cpu().double().sum(0)
    beyond = ~want.isfinite() | (lost >= 2.0**103)  # partial sums beyond the largest float
    assert bool((((got - want).abs() <= lost) | (beyond & ~got.isfinite())).all())


def check_one_read(provider, check, x, rank=0, tokens=1):
    """Every operator of the family on ``x``, as grad_output, weight and x alike."""
    *_, fold, peak, _, _ = check("quantize_one_read", x, rank, tokens)
    check_sums(provider("quantize_one_read", x, rank, tokens, True)[-1], x)
    check("quantize_one_read", x, rank, tokens, False, True)
    check("rescale_int8", *check("compress_int8", x, rank, tokens), fold, peak)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(check, shape, dtype):
    for flags in FLAGS:
        check("quantize_rows", sample(*shape, dtype), *flags)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_multiplied_columns(check, shape, dtype):
    factors = 2.0 ** (torch.arange(shape[1]) % 9 - 4)
    for given in (factors, factors * 1.1):
        check("quantize_rows", sample(*shape, dtype), 8, True, False, False, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 3, 5, 8, 16])
def test_columns(check, shape, dtype, rank):
    x = sample(*shape, dtype)
    for flags in FLAGS if rank in (0, 8) else FLAGS[::3]:
        check("quantize_columns", x, rank, 1, *flags)


@pytest.mark.parametrize("rank", range(17))
def test_columns_of_every_rank(check, rank):
    check("quantize_columns", sample(70, 20), rank, 1, 8, True, True)


@pytest.mark.parametrize(("samples", "tokens"), GROUPS)
@pytest.mark.parametrize("rank", [3, 5, 8, 16])
def test_columns_grouped_across_the_batch(check, samples, tokens, rank):
    x = sample(samples * tokens, 36)
    for per_column, stochastic in ((True, True), (False, True), (True, False)):
        check("quantize_columns", x, rank, tokens, 8, per_column, stochastic)


@pytest.mark.parametrize(("rows", "cols"), [(9000, 3), (5000, 16), (4100, 70)])
@pytest.mark.parametrize("rank", [0, 8])
def test_long_columns(check, rows, cols, rank):
    """Too few columns for a CPU's threads, or strips too long for its cache: done in chunks."""
    check("quantize_columns", sample(rows, cols), rank, 1, 8, True, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_grad(check, shape, dtype):
    x = sample(*shape, dtype)
    for bits, each, rank, per_column in ((4, True, 8, True), (8, False, 0, False)):
        check("quantize_grad", x, bits, each, rank, 1, per_column)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_grad_in_every_form(check, shape, dtype):
    x = sample(*shape, dtype)
    for args in itertools.product((4, 8), (True, False), (0, 7, 8, 16), (1,), (True, False)):
        check("quantize_grad", x, *args)


@pytest.mark.parametrize("rank", [0, 8, 16])
def test_grad_with_tokens(check, rank):
    check("quantize_grad", sample(35 * 50, 136, torch.bfloat16), 4, True, rank, 50, True)


@on_cuda
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, (70, 700), (40, 2304), (33, 3072), (50, 4096), (17, 11008), (20, 20000)],
)
def test_one_read(provider, check, shape, dtype, rank):
    """Rows that fill one block, clusters of them, and loops over the columns."""
    check_one_read(provider, check, sample(*shape, dtype), rank)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "tokens"), [*GROUPS, (40, 197)])
def test_one_read_grouped_across_the_batch(provider, check, samples, tokens, dtype):
    check_one_read(provider, check, sample(samples * tokens, 72, dtype), 8, tokens)


@on_cuda
@pytest.mark.parametrize(
    ("shape", "rank", "tokens"),
    [((9000, 2304), 0, 1), ((9000, 2304), 8, 200), ((4500, 4096), 0, 1)],
)
def test_one_read_of_many_tiles(provider, check, shape, rank, tokens):
    """More tiles than fit on the device at once; the last units have rows missing."""
    x = sample(*shape, torch.bfloat16)
    check("quantize_one_read", x, rank, tokens)
    check_sums(provider("quantize_one_read", x, rank, tokens, True)[-1], x)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 17), (197, 1000), (700, 2304), (90, 20000)])
def test_one_read_of_parts_and_rows_of_all_sizes(provider, check, shape, dtype):
    """Parts that are lifted, rows whose scale is shared with x, columns and rows of zeros."""
    rows, cols = shape
    x = sample(*shape, torch.float32) * (3 * torch.randn(rows, 1)).exp2()
    x *= (torch.arange(cols) * 5 // cols - 4).float().exp2().pow(2)
    x *= torch.rand(rows, 1) > 0.1
    check_one_read(provider, check, x.to(dtype))


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 16, 17, 1000])
@pytest.mark.parametrize(("inputs", "k"), [(1, 32), (15, 64), (768, 9024), (130, 131072 + 64)])
def test_product_of_transformed_integers(provider, outputs, inputs, k, dtype):
    """As good as fp32 butterflies are, in either layout, split K included."""
    padded = (outputs + 15) // 16 * 16
    a, b = (torch.randint(-127, 128, (n, k), dtype=torch.int8) for n in (padded, inputs))
    equal = torch.rand(padded // 16).repeat_interleave(16)
    for last in (False, True):
        args = (a, equal, b, torch.rand(inputs) / (5000 * k**0.5), outputs, last)
        got = provider("hadamard_int_mm", *args, dtype).cpu().double()
        want = reference.hadamard_int_mm(*args, torch.float64)
        most = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
        assert (got - want).norm() <= most * want.norm()


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_special_values(provider, check, value, everywhere):
    """inf, NaN, denormals, overflowing transforms and all-zero granules."""
    for dtype in DTYPES if provider.fused else DTYPES[:1]:
        x = strange(value, dtype, everywhere)
        for each, stochastic in itertools.product((True, False), (True, False)):
            check("quantize_rows", x, 4, each, stochastic)
            for rank in (0, 8):
                check("quantize_columns", x, rank, 1, 8, each, stochastic)
        for rank in (0, 6, 8, 16):
            check("quantize_grad", x, 4, True, rank, 1, True)
        check("quantize_grad", x, 8, False, 8, 5, False)


@on_cuda
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_special_values_in_one_read(provider, check, value, dtype, rank, everywhere):
    check_one_read(provider, check, strange(value, dtype, everywhere), rank)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_scale_at_the_ends_of_the_range(check, exponent):
    x = torch.randn(48, 64) * 2.0**exponent
    x[:, ::3] *= 2.0**-20
    check("quantize_grad", x, 4, True, 8, 1, True)
    check("quantize_columns", x, 16, 1, 8, True, False)


@on_cuda
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rank", [0, 8])
def test_scale_of_one_read_at_the_ends_of_the_range(provider, check, exponent, rank):
    x = torch.randn(48, 64) * 2.0**exponent
    x[:, ::3] *= 2.0**-20
    check_one_read(provider, check, x, rank)


def test_power_of_two_scales(check):
    """absmax = qmax 2^k: products by the reciprocal are exact and rounding meets ties."""
    x = torch.randint(-14, 15, (64, 48)).float() / 2
    x[:, 0] = 7
    for stochastic in (True, False):
        check("quantize_columns", x, 0, 1, 4, True, stochastic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(provider, definition, assert_same, layout, dtype):
    def same(name, x, *args):
        view = layouts(x.to(provider.device))[layout]
        assert_same(provider(name, view, *args), definition(name, x, *args))

    for shape in ((200, 136), (70, 1300)):
        x = sample(*shape, dtype)
        same("quantize_grad", x, 4, True, 8, 1, True)
        same("quantize_columns", x, 0, 1, 8, True, False)
        same("quantize_rows", x, 4, True, False)
        if provider.fused:
            for rank in (0, 8):
                same("quantize_one_read", x, rank, 1)
                same("compress_int8", x, rank, 1)
            same("quantize_one_read", x, 0, 1, False, True)
    row = sample(1, 136, dtype).to(provider.device).expand(40, -1)
    want = definition("quantize_grad", row.cpu(), 4, True, 8, 1, True)
    assert_same(provider("quantize_grad", row, 4, True, 8, 1, True), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("quantize_rows", (4, True, True)),
        ("quantize_rows", (4, False, False)),
        ("quantize_columns", (16, 1, 4, True, False)),
        ("quantize_grad", (4, True, 0, 1, True)),
        ("quantize_grad", (4, False, 8, 1, False)),
    ],
)
def test_packed_holds_the_very_integers(check, definition, assert_same, name, args, shape):
    for dtype in DTYPES:
        x = sample(*shape, dtype)
        packed, *rest = check(name, x, *args, True)
        plain, *others = definition(name, x, *args)
        assert_same(reference.unpack_int4(packed), plain)
        assert_same(rest, others)


def test_threads_change_nothing(assert_same):
    before = torch.get_num_threads()
    x = torch.randn(700, 200)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(torch.ops.hot.quantize_grad(x, 4, True, 8, 1, True))
    torch.set_num_threads(before)
    assert_same(*results)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_fresh_memory_is_poisoned():
    assert bool((torch.empty(1 << 20, dtype=torch.uint8) == POISON).all())
