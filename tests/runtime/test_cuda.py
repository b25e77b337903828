"""What only a CUDA device can show: streams, captured graphs, offsets beyond 32 bits."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from hot_compile.passes.layers import baselines  # noqa: F401  (operators)
from hot_compile.runtime import coding, planes, reference  # noqa: F401
from hot_compile.runtime.native import build
from hot_compile.runtime.reference.arithmetic import hadamard, transform_rows
from hot_compile.runtime.reference.one_read import one_read_scale_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    build.load("cuda")


@pytest.fixture(autouse=True)
def poison():
    """Every allocation starts as NaN or the largest integer, so a byte nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def two_reads(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Every operator of the family once, as a layer's backward uses them."""
    ops = torch.ops.hot
    x_q, x_scale = ops.quantize_columns(x, 0, 1, 8, True, False)
    row_q, row_scale, col_q, col_scale = ops.quantize_grad(g, 4, True, 0, 1, True)
    w_q, w_scale = ops.quantize_columns(w, 16, 1, 4, True, False)
    g_x = ops.scaled_int_mm(row_q, w_q, row_scale, w_scale, None, None, torch.bfloat16)
    g_w = ops.scaled_int_mm(col_q, x_q, col_scale, x_scale, None, None, torch.bfloat16)
    return x_q, x_scale, row_q, row_scale, col_q, col_scale, w_q, w_scale, g_x, g_w


def one_read(rank: int, x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Likewise."""
    ops = torch.ops.hot
    row_q, row_scale, col_q, fold, peak, equal, sums = ops.quantize_one_read(g, rank, 1, True, True)
    w_q, w_scale = ops.quantize_columns(w * equal[:, None], 16, 1, 8, True, False)
    x_q, x_scale = ops.rescale_int8(*ops.compress_int8(x, rank, 1), fold, peak)
    g_x = ops.scaled_int_mm(row_q, w_q, row_scale, w_scale, None, None, torch.bfloat16)
    g_w = ops.hadamard_int_mm(col_q, equal, x_q, x_scale, 384, False, torch.bfloat16)
    return row_q, row_scale, col_q, fold, peak, equal, sums, w_q, w_scale, x_q, x_scale, g_x, g_w


BACKWARDS = (two_reads, functools.partial(one_read, 0), functools.partial(one_read, 8))


def coded(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What uncompiled graphs store and restore tensors with: 6 bits in two planes."""
    ops = torch.ops.hot
    pieces = [*x.float().view(4, -1, 8, 32).unbind()]
    word = ops.scale_word(ops.group_size(pieces))
    scale = word.view(torch.float32)
    codes = [ops.code(piece, 31 / scale, 31, False) for piece in pieces]
    upper, lower = ops.plane(codes, 2, 4, torch.int16), ops.plane(codes, 0, 2, torch.uint8)
    nibbles = ops.restored_nibbles(lower, word)
    return upper, lower, nibbles, ops.restored_planes(upper, lower, scale.bfloat16(), 4, 31, False)


def baseline(method: str, x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Both products of a layer's backward by a method of the papers'."""
    ops = torch.ops.hot_baseline
    return ops.grad_input(g, w, method, 8), ops.grad_weight(g, x, method, 8)


CAPTURED = (
    *BACKWARDS,
    coded,
    *(functools.partial(baseline, method) for method in ("luq", "lbp-wht", "int4-naive")),
)


def layer() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((1000, 256), (1000, 384), (384, 256))
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)


def check_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_same_inputs_same_bits(backward):
    operands = layer()
    first = backward(*operands)
    for _ in range(5):
        check_equal(first, backward(*operands))


@pytest.mark.parametrize(
    ("backward", "most"), [(two_reads, (0.25, 0.25)), (BACKWARDS[1], (0.03, 0.15))]
)
def test_integers_give_the_gradient(backward, most):
    x, g, w = layer()
    *_, g_x, g_w = backward(x, g, w)
    exact = g.float() @ w.float(), g.float().t() @ x.float()
    for got, want, limit in zip((g_x, g_w), exact, most, strict=True):
        assert (got.float() - want).norm() / want.norm() < limit


@pytest.mark.parametrize("backward", CAPTURED)
def test_cuda_graph_replays_on_new_data(backward):
    """References, too: what they copied from the host no graph could capture."""
    operands = layer()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backward(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(*operands)
    for _ in range(3):
        for tensor, fresh in zip(operands, layer(), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        check_equal(captured, backward(*operands))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_runs_on_the_current_stream(backward):
    operands = layer()
    want = backward(*operands)
    late = tuple(torch.zeros_like(t) for t in operands)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for tensor, source in zip(late, operands, strict=True):
            tensor.copy_(source)
        got = backward(*late)
    stream.synchronize()
    check_equal(got, want)


def test_opcheck():
    x, ops = torch.randn(100, 72, device="cuda", dtype=torch.bfloat16), torch.ops.hot
    *_, fold, peak, equal, _ = ops.quantize_one_read(x[:, :32], 0, 1)
    blocks = torch.ones(32, 64, dtype=torch.int8, device="cuda")
    q, ones = torch.ones(20, 64, dtype=torch.int8, device="cuda"), torch.ones(20, device="cuda")
    calls = {
        "quantize_rows": (x, 4, True, True),
        "quantize_columns": (x.t().contiguous().t(), 8, 1, 8, True, False),
        "quantize_grad": (x, 4, True, 0, 1, True),
        "scaled_int_mm": (q, q, ones, ones, ones, ones, torch.bfloat16),
        "quantize_one_read": (x, 8, 5, True),
        "hadamard_int_mm": (blocks, equal, q, ones, 20, True, torch.bfloat16),
        "compress_int8": (x, 8, 1),
        "rescale_int8": (*ops.compress_int8(x, 0, 1), fold, peak),
    }
    for name, args in calls.items():
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=tests)


def test_convolutions_are_measured_by_their_definition():
    """The plan leaves them exact here; calibration still asks what they would cost."""
    small, big = (torch.randint(-9, 9, (n, 2 * 36), dtype=torch.int8) for n in (5, 3))
    sizes = (2, [6, 6], [6, 6], [3, 3], [1, 1], [1, 1], [1, 1], 0, torch.float32)
    args = (small, big, torch.rand(5), torch.rand(3))
    got = torch.ops.hot.conv_grad_weight(*(a.cuda() for a in args), *sizes)
    torch.testing.assert_close(got.cpu(), reference.conv_grad_weight(*args, *sizes))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("quantize_rows", (9, True, True), "bits is 9"),
        ("quantize_columns", (17, 1, 8, True, True), "rank is 17"),
        ("quantize_columns", (8, 3, 8, True, True), "not a multiple of tokens"),
        ("quantize_one_read", (4, 1), "rank is 4"),
        ("compress_int8", (8, 3), "not a multiple of tokens"),
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
    row_q, row_scale, col_q, col_scale = torch.ops.hot.quantize_grad(x, 4, True, 8, 1, True)
    want = reference.quantize_rows(tail.cpu(), 4, True, False)
    assert torch.equal(row_scale[-48:].cpu(), want[1])
    value = row_q[-48:].float().cpu() * want[1][:, None]
    assert (value - want[0].float() * want[1][:, None]).abs().max() <= 1.001 * want[1].max()
    kept = transform_rows(tail[-(rows % 16) - 16 :].float().cpu(), 8, 1)
    k = (rows + 15) // 16 * 8
    near = col_q[:, k - kept.shape[0] : k].float().cpu() * col_scale.cpu()[:, None]
    assert (near.t() - kept).abs().max() <= 1.001 * col_scale.max().item()
    q, scale = torch.ops.hot.compress_int8(x[: 2**21], 0, 1)
    want = reference.compress_int8(x[2**21 - 128 : 2**21].cpu(), 0, 1)
    check_equal((q[:, -128:].cpu(), scale[:, -1:].cpu()), want)


@pytest.mark.slow
def test_one_read_of_more_than_2_to_31_elements():
    """Offsets beyond 32 bits: the last rows against the definition on them alone."""
    rows, cols = 2**21 + 32, 1056
    g = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16)
    g.normal_()
    row_q, row_scale, col_q, fold, peak, _, sums = torch.ops.hot.quantize_one_read(g, 0, 1, True)
    assert (sums[-1] - g[-32:].float().sum(0)).abs().max() < 1e-3
    tail = hadamard(g[-64:].cpu().reshape(64, 66, 16)).reshape(64, cols).float()
    want, _ = one_read_scale_of(tail.abs().amax(1))
    assert torch.equal(row_scale[-64:].cpu(), want)
    assert torch.equal(fold[-64:].cpu(), want)
    assert torch.equal(peak[-4:].cpu(), want.reshape(4, 16).amax(1))
    assert torch.equal(col_q[:, -64:].t(), row_q[-64:])
    near = row_q[-64:].float().cpu() * want[:, None]
    assert ((near - tail).abs() <= 1.01 * want[:, None]).all()
    stored, scale = torch.ops.hot.compress_int8(g, 0, 1)
    x_q, x_scale = torch.ops.hot.rescale_int8(stored, scale, fold, peak)
    x = x_q[:, -64:].float() * x_scale[:, None]
    exact = (g[-64:].float() * fold[-64:, None]).t()
    # storage to half a step, the fold stochastically to a whole one
    assert ((x - exact).abs() <= 1.5 * x_scale[:, None] + 0.01 * exact.abs()).all()
