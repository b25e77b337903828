"""The INT4 product of Ampere and Ada, and the operators that pack its operands, on any GPU."""

from __future__ import annotations

import pytest
import torch
from cuda_samples import DTYPES, SHAPES, check_same, layouts, sample

from hot_compile.errors import BuildError
from hot_compile.runtime import build, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PRODUCTS = [
    (1, 1, 32),
    (17, 33, 64),
    (128, 128, 128),
    (130, 260, 96),
    (197, 768, 2304),
    (1000, 76, 4128),
    (5, 6, 0),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        build.load("cuda")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("HOT_CUDA_ARCH", "sm80")


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and got.is_contiguous() and torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisers_pack(shape, dtype):
    x = sample(*shape, dtype)
    for name, args in (
        ("quantize_rows", (4, True, True, True)),
        ("quantize_rows", (4, False, False, True)),
        ("quantize_grad", (4, True, 0, 1, True, True)),
        ("quantize_grad", (4, False, 8, 1, False, True)),
        ("quantize_columns", (16, 1, 4, True, False, True)),
    ):
        got = getattr(torch.ops.hot, name)(x.cuda(), *args)
        check_same(got, getattr(reference, name)(x, *args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", PRODUCTS)
def test_product_is_exact(mnk, dtype):
    """Without a rank-1 term each float step of the epilogue is the definition's."""
    m, n, k = mnk
    a, b = (torch.randint(-8, 8, (r, k), dtype=torch.int8, device="cuda") for r in (m, n))
    scales = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    want = reference.scaled_int_mm(a, b, *scales, None, None, dtype)
    packed = reference.pack_int4(a), reference.pack_int4(b)
    assert same(torch.ops.hot.scaled_int_mm(*packed, *scales, None, None, dtype), want)
    assert same(torch.ops.hot.scaled_int_mm(a, b, *scales, None, None, dtype), want)


@pytest.mark.parametrize("mnk", PRODUCTS)
def test_rank_1_term(mnk):
    """Small integers throughout, so that a fused multiply-add rounds nothing either."""
    m, n, k = mnk
    a, b = (torch.randint(-8, 8, (r, k), dtype=torch.int8, device="cuda") for r in (m, n))
    vectors = [torch.randint(-4, 5, (r,), device="cuda").float() for r in (m, n, m, n)]
    want = reference.scaled_int_mm(a, b, *vectors, torch.float32)
    packed = reference.pack_int4(a), reference.pack_int4(b)
    assert same(torch.ops.hot.scaled_int_mm(*packed, *vectors, torch.float32), want)
    assert same(torch.ops.hot.scaled_int_mm(a, b, *vectors, torch.float32), want)


@pytest.mark.parametrize("layout", ["row stride", "misaligned", "transposed"])
def test_packed_layouts(layout):
    view = layouts(torch.randint(0, 256, (70, 128), dtype=torch.uint8))[layout]
    dense = torch.randint(0, 256, (70, 128), dtype=torch.uint8, device="cuda")
    rest = (torch.ones(70, device="cuda"), torch.ones(70, device="cuda"), None, None, torch.float32)
    for operands in ((view, dense), (dense, view)):
        want = reference.scaled_int_mm(*operands, *rest)
        assert same(torch.ops.hot.scaled_int_mm(*operands, *rest), want)


def test_non_finite_scales_reach_the_output():
    q = torch.ones(64, 64, dtype=torch.int8, device="cuda")
    scale = torch.ones(64, device="cuda")
    scale[3] = float("nan")
    ones = torch.ones(64, device="cuda")
    packed = reference.pack_int4(q)
    out = torch.ops.hot.scaled_int_mm(packed, packed, scale, ones, None, None, torch.bfloat16)
    assert out[3].isnan().all()
    assert out.isfinite().sum() == 63 * 64


def test_mixed_operands_are_refused():
    q = torch.ones(64, 64, dtype=torch.int8, device="cuda")
    ones = torch.ones(64, device="cuda")
    with pytest.raises(RuntimeError, match="packed INT4"):
        torch.ops.hot.scaled_int_mm(
            q, reference.pack_int4(q), ones, ones, None, None, torch.float32
        )
