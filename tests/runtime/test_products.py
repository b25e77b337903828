"""The integer product of every provider: exact sums, floats within what fp32 rounding allows."""

from __future__ import annotations

import pytest
import torch
from conftest import on_cuda
from samples import DTYPES, LAYOUTS, layouts
from torch import Tensor

from hot_compile.runtime import reference

SHAPES = [
    *((1, 1, 32), (17, 33, 64), (40, 1, 96), (1, 50, 32), (3, 4, 0), (15, 17, 64), (128, 128, 128)),
    *((130, 260, 96), (17, 1000, 96), (197, 264, 160), (0, 4, 32), (4, 0, 32), (0, 0, 32)),
]
LARGE = [
    *((1000, 15, 4096), (1, 4096, 128), (512, 768, 2304), (129, 257, 12608), (3072, 768, 12608)),
    *((2048, 4096, 2048), (197, 768, 2304), (1000, 76, 4128)),
]


def integers(m: int, n: int, k: int, low: int = -128, high: int = 128) -> list[Tensor]:
    return [torch.randint(low, high, (rows, k), dtype=torch.int8) for rows in (m, n)]


def vectors(m: int, n: int, terms: bool) -> list[Tensor | None]:
    scales = [torch.rand(m) / 100, torch.rand(n) / 100]
    return [*scales, *((torch.randn(m), torch.randn(n)) if terms else (None, None))]


def within_budget(got: Tensor, args: list) -> None:
    """3 fp32 roundings of the terms, 1 of the output: a fused multiply-add in the rank-1 term and
    the order of the factors may round differently."""
    a, b, a_scale, b_scale, row, col, dtype = args
    exact = (a.double() @ b.double().t()) * a_scale.double()[:, None] * b_scale.double()
    size = exact.abs()
    if row is not None:
        term = row.double()[:, None] * col.double()
        exact, size = exact + term, size + term.abs()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[dtype]
    small = 2.0**-24 if dtype == torch.float16 else 0.0
    error = (got.double() - exact).abs()
    budget = size * 4 * 2.0**-24 + exact.abs() * rounding + small
    beyond = exact.abs() >= torch.finfo(dtype).max
    assert bool(((error <= budget) | beyond).all())
    assert (got.shape, got.dtype, got.is_contiguous()) == (exact.shape, dtype, True)


@pytest.fixture
def check_product(provider, definition, assert_same):
    """The product of these operands: the definition's, or within its budget on CUDA."""

    def check(*args) -> None:
        got = provider("scaled_int_mm", *args)
        if provider.fused:
            within_budget(got, [a.cpu() if isinstance(a, Tensor) else a for a in args])
        else:
            assert_same(got, definition("scaled_int_mm", *args))

    return check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", SHAPES)
def test_shapes(check_product, mnk, dtype):
    for terms in (False, True):
        check_product(*integers(*mnk), *vectors(*mnk[:2], terms), dtype)


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", LARGE)
def test_large_shapes(check_product, mnk, dtype):
    for terms in (False, True):
        check_product(*integers(*mnk), *vectors(*mnk[:2], terms), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_beyond_int32(check_product, dtype):
    """K of 270,000 extreme products exceeds int32; the sum must still be exact."""
    a = torch.full((24, 270_016), 127, dtype=torch.int8)
    b = torch.full((40, 270_016), -127, dtype=torch.int8)
    a[1], b[1] = -128, -128
    for terms in (False, True):
        check_product(a, b, *vectors(24, 40, terms), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(provider, check_product, layout):
    a, b = integers(70, 90, 128)
    row, col, *terms = vectors(70, 90, True)
    view = layouts(a.to(provider.device))[layout]
    check_product(view, b, row, col, *terms, torch.bfloat16)
    check_product(b, view, col, row, *reversed(terms), torch.bfloat16)
    vector = torch.randn(200).to(provider.device)
    views = (vector[1:71], vector[3:93], vector[:140:2], vector[::2][:90])
    check_product(a, b, *views, torch.bfloat16)


@pytest.mark.parametrize("packed", [False, True])
def test_non_finite_scales_reach_the_output(provider, packed):
    q = torch.ones(64, 64, dtype=torch.int8)
    q = reference.pack_int4(q) if packed else q
    scale, ones = torch.ones(64), torch.ones(64)
    scale[3] = float("nan")
    out = provider("scaled_int_mm", q, q, scale, ones, None, None, torch.bfloat16)
    assert out[3].isnan().all()
    assert int(out.isfinite().sum()) == 63 * 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)])
def test_packed_operands(provider, assert_same, mnk, dtype):
    """Without a rank-1 term, or with small integers, each float step is the definition's."""
    m, n, k = mnk
    a, b = integers(m, n, k, -8, 8)
    pairs = reference.pack_int4(a), reference.pack_int4(b)
    small = [torch.randint(-4, 5, (r,)).float() for r in (m, n, m, n)]
    for rest in ((*vectors(m, n, False), dtype), (*small, torch.float32)):
        want = reference.scaled_int_mm(a, b, *rest)
        assert_same(provider("scaled_int_mm", *pairs, *rest), want)
        assert_same(provider("scaled_int_mm", a, b, *rest), want)


@pytest.mark.parametrize("layout", ["row stride", "misaligned", "transposed"])
def test_layouts_of_packed_operands(provider, assert_same, layout):
    pairs = torch.randint(0, 256, (70, 128), dtype=torch.uint8)
    view = layouts(pairs.to(provider.device))[layout]
    rest = (torch.ones(70), torch.ones(70), None, None, torch.float32)
    want = reference.scaled_int_mm(pairs, pairs, *rest)
    assert_same(provider("scaled_int_mm", view, pairs, *rest), want)
    assert_same(provider("scaled_int_mm", pairs, view, *rest), want)


def test_one_packed_operand_is_refused(provider):
    a, b = torch.zeros(64, 64, dtype=torch.int8), torch.zeros(64, 32, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="packed INT4"):
        provider("scaled_int_mm", a, b, torch.ones(64), torch.ones(64), None, None, torch.float32)
