"""CUDA: the operators of one shared quantisation against their definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cuda_samples import DTYPES, SHAPES, check_same, layouts, sample, strange
from test_shared import check_sums
from torch import Tensor

from hot_compile.runtime import build, reference, reference_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = [(40, 2304), (33, 3072), (50, 4096), (17, 11008), (20, 20000)]  # one block, clusters, loops


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


def check(name: str, *args: object) -> tuple[Tensor, ...]:
    """``hot::name`` on the device against the definition on the CPU, which is returned."""
    moved = [a.cuda() if isinstance(a, Tensor) and a.device.type == "cpu" else a for a in args]
    plain = [a.cpu() if isinstance(a, Tensor) else a for a in args]
    want = getattr(reference_shared, name)(*plain)
    check_same(getattr(torch.ops.hot, name)(*moved), want)
    return want


def check_all(x: Tensor, rank: int, tokens: int) -> None:
    """Every operator on ``x``, taken as grad_output, weight and x alike."""
    *_, fold, peak, equal, _ = check("quantize_shared", x, rank, tokens)
    check_sums(torch.ops.hot.quantize_shared(x.cuda(), rank, tokens, True)[-1], x.cpu())
    check("quantize_weight", x, torch.rand(x.shape[0]), False)
    check("quantize_weight", x, equal, True)
    stored = check("compress_int8", x, rank, tokens)
    check("rescale_int8", *stored, fold, peak)
    if rank == 0:
        check("rescale_int4", *reference.compress_int4(x.cpu()), fold, peak)


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE])
def test_shapes(shape, dtype, rank, arch, monkeypatch):
    monkeypatch.setenv("HOT_CUDA_ARCH", arch)
    check_all(sample(*shape, dtype), rank, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("samples", "tokens"), [(3, 5), (16, 7), (33, 11), (40, 197)])
def test_tokens_group_across_the_batch(samples, tokens, dtype):
    check_all(sample(samples * tokens, 72, dtype), 8, tokens)


@pytest.mark.parametrize(
    ("shape", "rank", "tokens"),
    [((9000, 2304), 0, 1), ((9000, 2304), 8, 200), ((4500, 4096), 0, 1)],
)
def test_many_tiles(shape, rank, tokens):
    """More tiles than fit on the device at once; the last units have rows missing."""
    x = sample(*shape, torch.bfloat16)
    check("quantize_shared", x, rank, tokens)
    check_sums(torch.ops.hot.quantize_shared(x.cuda(), rank, tokens, True)[-1], x)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    ["nan", "inf", "-inf", "zero", "largest", "smallest", "subnormal", "constant", "power"],
)
def test_strange_values(kind, dtype, rank):
    check_all(strange(kind, dtype), rank, 1)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("exponent", [-126, -117, -101, -100, -99, -92, -60, 60, 99, 120])
def test_scale_at_the_ends_of_the_range(exponent, rank):
    x = torch.randn(48, 64) * 2.0**exponent
    x[:, ::3] *= 2.0**-20
    check_all(x, rank, 1)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", ["row stride", "misaligned rows", "misaligned", "transposed", "column stride"]
)
def test_layouts(layout, dtype, rank):
    check_all(layouts(sample(200, 136, dtype))[layout], rank, 1)
    check_all(layouts(sample(70, 1300, dtype))[layout], rank, 1)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0)])
def test_empty(shape, rank):
    check_all(torch.zeros(shape, dtype=torch.bfloat16), rank, 1)


def backward(x: Tensor, g: Tensor, w: Tensor, rank: int) -> tuple[Tensor, ...]:
    """Every operator once, as a layer's backward uses them."""
    ops = torch.ops.hot
    row_q, row_scale, col_q, fold, peak, equal, sums = ops.quantize_shared(g, rank, 1, True)
    w_q, w_scale = ops.quantize_weight(w, equal, False)
    if rank == 0:
        x_q, x_scale = ops.rescale_int4(*ops.compress_int4(x), fold, peak)
    else:
        x_q, x_scale = ops.rescale_int8(*ops.compress_int8(x, rank, 1), fold, peak)
    g_x = ops.scaled_int_mm(row_q, w_q, row_scale, w_scale, None, None, torch.bfloat16)
    g_w = ops.scaled_int_mm(col_q, x_q, equal, x_scale, None, None, torch.bfloat16)
    return row_q, row_scale, col_q, fold, peak, equal, sums, w_q, w_scale, x_q, x_scale, g_x, g_w


def layer() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((1000, 256), (1000, 1184), (1184, 256))
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)


def test_integers_give_the_gradient():
    x, g, w = layer()
    *_, g_x, g_w = backward(x, g, w, 0)
    for got, exact, most in (
        (g_x, g.float() @ w.float(), 0.03),
        (g_w, g.float().t() @ x.float(), 0.15),
    ):
        assert (got.float() - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("rank", [0, 8])
def test_same_bits_again_and_from_a_captured_graph(rank):
    operands = layer()
    want = backward(*operands, rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(*operands, rank)
    for _ in range(3):
        graph.replay()
        for a, b in zip(captured, want, strict=True):
            assert torch.equal(a, b)
        for tensor, fresh in zip(operands, layer(), strict=True):
            tensor.copy_(fresh)
        want = backward(*operands, rank)


def test_opcheck():
    x = torch.randn(100, 72, device="cuda", dtype=torch.bfloat16)
    ops, tests = torch.ops.hot, ("test_schema", "test_faketensor")
    *_, fold, peak, equal, _ = ops.quantize_shared(x, 0, 1)
    calls = {
        "quantize_shared": (x, 8, 5, True),
        "quantize_weight": (x.t(), equal, False),
        "compress_int8": (x, 8, 1),
        "rescale_int8": (*ops.compress_int8(x, 0, 1), fold, peak),
        "rescale_int4": (*ops.compress_int4(x), fold, peak),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=tests)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("quantize_shared", (4, 1), "rank is 4"),
        ("compress_int8", (8, 3), "not a multiple of tokens"),
        ("quantize_weight", (torch.ones(7), False), "float32 vector of 16"),
    ],
)
def test_mistakes_are_named(name, args, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.hot, name)(torch.zeros(16, 16, device="cuda"), *args)


@pytest.mark.slow
def test_more_than_2_to_31_elements():
    """Offsets beyond 32 bits: the last rows against the definition on them alone."""
    rows, cols = 2**21 + 32, 1056
    g = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
    g.normal_()
    row_q, row_scale, col_q, fold, peak, equal, sums = torch.ops.hot.quantize_shared(g, 0, 1, True)
    assert (sums[-1] - g[-32:].float().sum(0)).abs().max() < 1e-3
    tail = g[-64:].float().cpu() * (2.0**-8 / equal.cpu())
    want, _ = reference_shared.shared_scale_of(tail.abs().amax(1))
    assert torch.equal(row_scale[-64:].cpu(), want)
    assert torch.equal(fold[-64:].cpu(), want)
    assert torch.equal(peak[-4:].cpu(), want.reshape(4, 16).amax(1))
    assert torch.equal(col_q[:, -64:].t(), row_q[-64:])
    near = row_q[-64:].float().cpu() * want[:, None] * equal.cpu()
    assert ((near - g[-64:].float().cpu()).abs() <= 1.01 * want[:, None] * equal.cpu()).all()
    stored, scale = torch.ops.hot.compress_int8(g, 0, 1)
    x_q, x_scale = torch.ops.hot.rescale_int8(stored, scale, fold, peak)
    x = x_q[:, -64:].float() * x_scale[:, None]
    exact = (g[-64:].float() * fold[-64:, None]).t()
    assert ((x - exact).abs() <= x_scale[:, None] + 0.01 * exact.abs()).all()
