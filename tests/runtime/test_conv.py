"""Convolution operators: index handling is exact, providers equal the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import on_cpu

from hot_compile.passes.layers.positions import tiled
from hot_compile.runtime import reference
from hot_compile.runtime.reference import conv

CONVS = {
    1: F.conv1d,
    2: F.conv2d,
    3: F.conv3d,
}
# kernel, stride, padding, dilation, size: every combination that leaves an output
GRID = [
    (k, s, p, d, n)
    for k, s, p, d, n in itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2, 3), (1, 2, 3), (6, 9)
    )
    if n + 2 * p >= d * (k - 1) + 1
]


def rows_of(t):
    """[B, C, *size] -> [B * positions, C]."""
    return t.movedim(1, -1).reshape(-1, t.shape[1])


class Case:
    """Integer-valued operands of one convolution and autograd's exact gradients."""

    def __init__(self, dims, k, s, p, d, sizes, batch=2, inputs=3, outputs=5):
        self.settings = [[v] * dims for v in (k, s, p, d)]
        self.big_size = list(sizes[:dims])
        self.x = torch.randint(-7, 8, (batch, inputs, *self.big_size)).double().requires_grad_()
        self.w = (
            torch.randint(-7, 8, (outputs, inputs, *self.settings[0])).double().requires_grad_()
        )
        y = CONVS[dims](self.x, self.w, None, *self.settings[1:])
        self.small_size = list(y.shape[2:])
        self.g = torch.randint(-7, 8, y.shape).double()
        y.backward(self.g)
        self.geometry = (batch, self.small_size, self.big_size, *self.settings)

    def columns(self, t, zero=0):
        """int8 [C, positions] of ``t`` less ``zero``."""
        return (rows_of(t.detach()).t() - zero).to(torch.int8).contiguous()

    def weight_rows(self):
        return self.w.detach().movedim(1, -1).flatten(1).t().to(torch.int8).contiguous()

    def grad_weight(self, got):
        return got.movedim(-1, 1).double()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_reference_index_handling_is_exact(dims):
    for k, s, p, d, n in GRID if dims < 3 else GRID[::11]:
        check_exact(conv, Case(dims, k, s, p, d, (n, n + 1, n + 2)))


def check_exact(provider, case):
    """g_w and g_x of integers equal autograd's."""
    outputs, inputs = case.w.shape[:2]
    one = torch.ones
    small, big = case.columns(case.g), case.columns(case.x)
    tail = (*case.geometry, 0, torch.float32)
    got = provider.conv_grad_weight(small, big, one(outputs), one(inputs), *tail)
    assert torch.equal(case.grad_weight(got), case.w.grad), case.geometry
    rows, weight = small.t().contiguous(), case.weight_rows()
    args = (rows, weight, one(len(rows)), one(len(weight)), *case.geometry, torch.float32)
    assert torch.equal(provider.conv_grad_input(*args).movedim(-1, 1).double(), case.x.grad)


class Named:
    """A provider's operators as attributes, as the reference's functions are."""

    def __init__(self, call):
        self.call = call

    def __getattr__(self, name):
        return lambda *args: self.call(name, *args)


@on_cpu
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_index_handling_is_exact(provider, dims):
    for k, s, p, d, n in GRID if dims == 2 else GRID[::5]:
        check_exact(Named(provider), Case(dims, k, s, p, d, (n, n + 1, n + 2)))


SHAPES = [  # dims, kernel, stride, padding, dilation, sizes, batch, inputs, outputs
    (2, 3, 1, 1, 1, (14, 14), 2, 16, 32),
    (2, 3, 2, 1, 1, (15, 17), 3, 20, 7),
    (2, 1, 2, 0, 1, (9, 9), 1, 33, 17),
    (2, 2, 2, 0, 1, (8, 8), 2, 5, 70),
    (2, 3, 1, 4, 4, (9, 9), 2, 4, 4),
    (2, 7, 2, 3, 1, (20, 20), 1, 3, 8),
    (1, 5, 3, 2, 2, (40,), 4, 6, 9),
    (3, 3, 2, 1, 1, (5, 6, 7), 2, 4, 6),
    (2, 3, 1, 1, 1, (1, 1), 1, 1, 1),
    (2, 3, 1, 1, 1, (197, 15), 1, 2, 3),
]


def random_case(dims, k, s, p, d, sizes, batch, inputs, outputs):
    case = Case(dims, k, s, p, d, sizes, batch, inputs, outputs)
    small = torch.randint(-127, 128, (outputs, case.g[:, 0].numel()), dtype=torch.int8)
    big = torch.randint(-127, 128, (inputs, case.x[:, 0].numel()), dtype=torch.int8)
    scales = torch.rand(outputs) / 50, torch.rand(inputs) / 50
    return case, small, big, scales


@on_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conv_grad_weight(provider, assert_same, shape, dtype):
    case, small, big, scales = random_case(*shape)
    args = (small, big, *scales, *case.geometry, 0, dtype)
    assert_same(provider("conv_grad_weight", *args), conv.conv_grad_weight(*args))


@on_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 8, 16])
def test_conv_grad_weight_of_tiles(provider, assert_same, shape, rank):
    case, _, big, (_, big_scale) = random_case(*shape)
    g = rows_of(torch.randn_like(case.g)).float()
    tiles = tiled(g, case.small_size)
    small, scale = reference.quantize_columns(tiles, rank, 1, 8, True, True)
    args = (small, big, scale, big_scale, *case.geometry, rank, torch.float32)
    assert_same(provider("conv_grad_weight", *args), conv.conv_grad_weight(*args))


@on_cpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conv_grad_input(provider, shape, dtype):
    """Integers are exact; floats are summed in the provider's order."""
    case, small, _, _ = random_case(*shape)
    rows = padded(small.t()).contiguous()
    weight = torch.randint(-127, 128, (case.w[0].numel(), rows.shape[1]), dtype=torch.int8)
    args = (rows, weight, torch.rand(len(rows)) / 50, torch.rand(len(weight)) / 50)
    args = (*args, *case.geometry, dtype)
    got, want = provider("conv_grad_input", *args), conv.conv_grad_input(*args)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    # sums of at most kk fp32 terms in another order, then one rounding to dtype
    size = want.float().abs().max()
    budget = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (got.float() - want.float()).abs().max() <= budget * size


def test_full_transform_approximates_the_plain_product():
    """HLA(16) drops nothing: what is left is the rounding of tiles to int8."""
    case = Case(2, 3, 1, 1, 1, (13, 14), 4, 6, 8)
    g, x = rows_of(torch.randn_like(case.g)).float(), rows_of(torch.randn_like(case.x)).float()
    exact = torch.ops.aten.convolution_backward(
        g.view(4, 13, 14, 8).permute(0, 3, 1, 2), x.view(4, 13, 14, 6).permute(0, 3, 1, 2),
        case.w.detach().float(), None, *case.settings[1:], False, [0, 0], 1, [False, True, False],
    )[1]  # fmt: skip
    small, scale = reference.quantize_columns(tiled(g, case.small_size), 16, 1, 8, True, False)
    big, big_scale = reference.quantize_columns(x, 0, 1, 8, True, False)
    got = conv.conv_grad_weight(small, big, scale, big_scale, *case.geometry, 16, torch.float32)
    error = (got.movedim(-1, 1) - exact).norm() / exact.norm()
    assert error < 0.06  # a step of 4 times the INT8 grid's, uniform: 0.0083 * 4 at absmax 3.5


@pytest.mark.parametrize("name", ["conv_grad_weight", "conv_grad_input"])
def test_opcheck(name):
    case, small, big, scales = random_case(*SHAPES[1])
    if name == "conv_grad_weight":
        args = (small.t().contiguous().t(), big, *scales, *case.geometry, 0, torch.float32)
    else:
        rows, weight = small.t(), case.weight_rows()
        args = (rows, weight, torch.ones(len(rows)), torch.ones(len(weight)), *case.geometry)
        args = (*args, torch.bfloat16)
    torch.library.opcheck(getattr(torch.ops.hot, name).default, args)


def test_wrong_arguments_say_what_was_expected():
    case, small, big, scales = random_case(*SHAPES[0])
    op = torch.ops.hot.conv_grad_weight
    tail = (*case.geometry, 0, torch.float32)
    with pytest.raises(RuntimeError, match="expected small of at least"):
        op(small[:, :5], big, *scales, *tail)
    with pytest.raises(RuntimeError, match="expected 2 sizes, strides"):
        op(small, big, *scales, 2, [14], *tail[2:])
    with pytest.raises(RuntimeError, match="expected 392 rows"):
        torch.ops.hot.conv_grad_input(small, big, *scales, *case.geometry, torch.float32)


def padded(t):
    """K up to a multiple of 32, as the quantise operators write it."""
    return F.pad(t, (0, -t.shape[1] % 32))
