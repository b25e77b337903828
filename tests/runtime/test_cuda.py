"""CUDA operators against reference.py: integers and scales bit for bit, outputs poisoned first."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_samples import DTYPES, SHAPES, check_same, layouts, sample, strange
from torch import Tensor

from hot_compile.runtime import build, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPERATORS = (
    *("quantize_rows", "quantize_columns", "quantize_grad", "compress_int4", "expand_int4"),
    "scaled_int_mm",
)
GEMM_SHAPES = [
    *((1, 1, 32), (15, 17, 64), (17, 1000, 96), (197, 264, 160), (1000, 15, 4096), (1, 4096, 128)),
    *((512, 768, 2304), (129, 257, 12608), (3072, 768, 12608), (2048, 4096, 2048)),
]


@pytest.fixture(scope="module", autouse=True)
def _library():
    build.load("cuda")


@pytest.fixture(autouse=True)
def _poison():
    """Every allocation starts as NaN or the largest integer, so a byte nobody wrote shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(name: str, x: Tensor, *args: object) -> None:
    """``hot::name`` on the device against the reference on the CPU."""
    got = getattr(torch.ops.hot, name)(x.cuda() if x.device.type == "cpu" else x, *args)
    check_same(got, getattr(reference, name)(x.cpu(), *args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_rows(shape, dtype):
    x = sample(*shape, dtype)
    for bits, per_row, stochastic in itertools.product((4, 8), (True, False), (True, False)):
        check("quantize_rows", x, bits, per_row, stochastic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 8, 16, 5, 1])
def test_quantize_columns(shape, dtype, rank):
    x = sample(*shape, dtype)
    for bits, per_column, stochastic in itertools.product((4, 8), (True, False), (True, False)):
        check("quantize_columns", x, rank, 1, bits, per_column, stochastic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "tokens"), [(3, 5), (16, 7), (33, 11), (40, 197)])
@pytest.mark.parametrize("rank", [8, 16, 3])
def test_tokens_group_across_the_batch(samples, tokens, rank, dtype):
    x = sample(samples * tokens, 72, dtype)
    check("quantize_columns", x, rank, tokens, 8, True, False)
    check("quantize_columns", x, rank, tokens, 8, False, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_grad(shape, dtype):
    x = sample(*shape, dtype)
    for bits, per_row, rank, per_column in itertools.product(
        (4, 8), (True, False), (0, 8, 16, 7), (True, False)
    ):
        check("quantize_grad", x, bits, per_row, rank, 1, per_column)


@pytest.mark.parametrize("rank", [0, 8, 16])
def test_quantize_grad_with_tokens(rank):
    check("quantize_grad", sample(35 * 50, 136, torch.bfloat16), 4, True, rank, 50, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (128, 64), (129, 9), (1000, 100)])
def test_int4_storage(shape, dtype):
    x = sample(*shape, dtype)
    check("compress_int4", x)
    stored = reference.compress_int4(x)
    got = torch.ops.hot.expand_int4(*(t.cuda() for t in stored))
    check_same(got, reference.expand_int4(*stored))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    ["nan", "inf", "-inf", "zero", "largest", "smallest", "subnormal", "constant", "power"],
)
def test_strange_values(kind, dtype):
    x = strange(kind, dtype)
    for rank in (0, 8, 16, 6):
        check("quantize_grad", x, 4, True, rank, 1, True)
        check("quantize_columns", x, rank, 1, 4, True, False)
    check("quantize_grad", x, 8, False, 8, 7, False)
    check("quantize_rows", x, 4, True, False)
    check("compress_int4", x)
    stored = reference.compress_int4(x)
    check_same(
        torch.ops.hot.expand_int4(*(t.cuda() for t in stored)), reference.expand_int4(*stored)
    )


@pytest.mark.parametrize("exponent", [-126, -117, -116, -115, -92, -91, -60, 60, 99, 120])
def test_scale_at_the_ends_of_the_range(exponent):
    x = torch.randn(48, 64) * 2.0**exponent
    x[:, ::3] *= 2.0**-20
    check("quantize_grad", x, 4, True, 8, 1, True)
    check("quantize_columns", x, 16, 1, 8, True, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", ["row stride", "misaligned rows", "misaligned", "transposed", "column stride"]
)
def test_layouts(layout, dtype):
    x = layouts(sample(200, 136, dtype))[layout]
    check("quantize_grad", x, 4, True, 8, 1, True)
    check("quantize_columns", x, 0, 1, 8, True, False)
    check("quantize_rows", x, 4, True, False)
    check("compress_int4", x)
    check("quantize_grad", x[:1].expand(40, -1), 4, True, 8, 1, True)


@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0)])
def test_empty(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    check("quantize_grad", x, 4, True, 8, 1, True)
    check("quantize_columns", x, 0, 1, 8, True, False)
    check("compress_int4", x)


def product_inputs(m: int, n: int, k: int, rank_1: bool) -> list[Tensor | None]:
    """Operands of scaled_int_mm on the device, integers over the whole range."""
    a, b = (torch.randint(-128, 128, (r, k), dtype=torch.int8, device="cuda") for r in (m, n))
    vectors = [torch.randn(r, device="cuda") for r in (m, n, m, n)]
    return [a, b, *vectors[:2], *(vectors[2:] if rank_1 else (None, None))]


def check_product(inputs: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Against the reference within its budget: 3 fp32 roundings of the terms, 1 of the output.

    A fused multiply-add in the rank-1 term and the order of the factors may round differently.
    """
    got = torch.ops.hot.scaled_int_mm(*inputs, dtype)
    a, b, a_scale, b_scale, row, col = inputs
    exact = (a.double() @ b.double().t()) * a_scale.double()[:, None] * b_scale.double()
    size = exact.abs()
    if row is not None:
        term = row.double()[:, None] * col.double()
        exact, size = exact + term, size + term.abs()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}[dtype]
    largest = torch.finfo(dtype).max
    small = 2.0**-24 if dtype == torch.float16 else 0.0
    error = (got.double() - exact).abs()
    budget = size * 4 * 2.0**-24 + exact.abs() * rounding + small
    assert ((error <= budget) | (exact.abs() >= largest)).all(), (error - budget).max().item()
    assert got.dtype == dtype
    assert got.is_contiguous()
    return got


@pytest.mark.parametrize("provider", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GEMM_SHAPES)
def test_scaled_int_mm(shape, dtype, provider, monkeypatch):
    monkeypatch.setenv("HOT_CUDA_ARCH", provider)
    for rank_1 in (False, True):
        check_product(product_inputs(*shape, rank_1), dtype)


@pytest.mark.parametrize("provider", ["sm90", "sm80"])
def test_scaled_int_mm_beyond_int32(provider, monkeypatch):
    monkeypatch.setenv("HOT_CUDA_ARCH", provider)
    inputs = product_inputs(24, 40, 400_000 // 32 * 32, True)
    inputs[0].fill_(-128)
    inputs[1].fill_(-128)
    check_product(inputs, torch.float32)


@pytest.mark.parametrize("provider", ["sm90", "sm80"])
def test_scaled_int_mm_layouts(provider, monkeypatch):
    monkeypatch.setenv("HOT_CUDA_ARCH", provider)
    a, b, *rest = product_inputs(70, 90, 128, True)
    wide = torch.randint(-9, 9, (70, 192), dtype=torch.int8, device="cuda")
    for view in (wide[:, 32:160], wide[:, 5:133], a.t().contiguous().t()):
        check_product([view, b, *rest], torch.bfloat16)
        check_product([b, view, rest[1], rest[0], rest[3], rest[2]], torch.bfloat16)
    vector = torch.randn(200, device="cuda")
    check_product(
        [a, b, vector[1:71], vector[3:93], vector[:140:2], vector[::2][:90]], torch.bfloat16
    )


def test_scaled_int_mm_nothing_contracted():
    inputs = product_inputs(5, 7, 0, True)
    check_product(inputs, torch.float32)
    assert torch.ops.hot.scaled_int_mm(*product_inputs(0, 7, 32, False), torch.float32).numel() == 0


def test_non_finite_scales_reach_the_output():
    inputs = product_inputs(64, 64, 64, False)
    inputs[2][3] = float("nan")
    out = torch.ops.hot.scaled_int_mm(*inputs, torch.bfloat16)
    assert out[3].isnan().all()
    assert out.isfinite().sum() == 63 * 64


def whole_backward(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Every operator once, as a layer's backward uses them."""
    ops = torch.ops.hot
    stored = ops.compress_int4(x)
    row_q, row_scale, col_q, col_scale, total = ops.quantize_grad(g, 4, True, 0, 1, True)
    w_q, w_scale, _ = ops.quantize_columns(w, 16, 1, 4, True, False)
    x_q, x_scale, zero = ops.expand_int4(*stored)
    g_x = ops.scaled_int_mm(row_q, w_q, row_scale, w_scale, None, None, torch.bfloat16)
    g_w = ops.scaled_int_mm(col_q, x_q, col_scale, x_scale, total, zero, torch.bfloat16)
    return (*stored, row_q, row_scale, col_q, col_scale, total, w_q, w_scale, g_x, g_w)


def layer() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((1000, 256), (1000, 384), (384, 256))
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)


def check_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_same_inputs_same_bits():
    operands = layer()
    first = whole_backward(*operands)
    for _ in range(5):
        check_equal(first, whole_backward(*operands))


def test_integers_give_the_gradient():
    x, g, w = layer()
    *_, g_x, g_w = whole_backward(x, g, w)
    for got, exact in ((g_x, g.float() @ w.float()), (g_w, g.float().t() @ x.float())):
        error = (got.float() - exact).norm() / exact.norm()
        assert error < 0.25


def test_cuda_graph_replays_on_new_data():
    operands = layer()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        whole_backward(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole_backward(*operands)
    for _ in range(3):
        for tensor, fresh in zip(operands, layer(), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        check_equal(captured, whole_backward(*operands))


def test_runs_on_the_current_stream():
    operands = layer()
    want = whole_backward(*operands)
    late = tuple(torch.zeros_like(t) for t in operands)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for tensor, source in zip(late, operands, strict=True):
            tensor.copy_(source)
        got = whole_backward(*late)
    stream.synchronize()
    check_equal(got, want)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    x = torch.randn(100, 72, device="cuda", dtype=torch.bfloat16)
    stored = torch.ops.hot.compress_int4(x)
    samples = {
        "quantize_rows": (x, 4, True, True),
        "quantize_columns": (x.t().contiguous().t(), 8, 1, 8, True, False),
        "quantize_grad": (x, 4, True, 0, 1, True),
        "compress_int4": (x,),
        "expand_int4": stored,
        "scaled_int_mm": (*product_inputs(20, 30, 64, True), torch.bfloat16),
    }
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.hot, name).default, samples[name], test_utils=tests)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("quantize_rows", (9, True, True), "bits is 9"),
        ("quantize_columns", (17, 1, 8, True, True), "rank is 17"),
        ("quantize_columns", (8, 3, 8, True, True), "not a multiple of tokens"),
    ],
)
def test_mistakes_are_named(name, args, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hot, name)(torch.zeros(16, 16, device="cuda"), *args)


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    """Offsets beyond 32 bits, checked on the last rows and columns against the reference there."""
    rows, cols = 2**21 + 40, 1032
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    tail = x[-48:].clone()
    row_q, row_scale, col_q, col_scale, _ = torch.ops.hot.quantize_grad(x, 4, True, 8, 1, True)
    want = reference.quantize_rows(tail.cpu(), 4, True, False)
    assert torch.equal(row_scale[-48:].cpu(), want[1])
    value = row_q[-48:].float().cpu() * want[1][:, None]
    assert (value - want[0].float() * want[1][:, None]).abs().max() <= 1.001 * want[1].max()
    kept = reference._transform_rows(tail[-(rows % 16) - 16 :].float().cpu(), 8, 1)
    k = (rows + 15) // 16 * 8
    near = col_q[:, k - kept.shape[0] : k].float().cpu() * col_scale.cpu()[:, None]
    assert (near.t() - kept).abs().max() <= 1.001 * col_scale.max().item()
    packed, scale, minimum = torch.ops.hot.compress_int4(x[: 2**21])
    want = reference.compress_int4(x[2**21 - 128 : 2**21].cpu())
    check_same((packed[:, -64:].contiguous(), scale[:, -1:], minimum[:, -1:]), want)
