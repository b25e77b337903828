"""Products and convolutions of all small sizes, whose strides are ambiguous, on poisoned memory."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from conftest import on_cpu
from torch import nn

from hot_compile.runtime import reference
from hot_compile.testing import hot_step

SIZES = (0, 1, 2, 3, 5, 17)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def strided(t: torch.Tensor, gap: int) -> torch.Tensor:
    """Equal to ``t``, its rows ``gap`` elements further apart in memory."""
    wide = torch.nn.functional.pad(t, (0, gap), value=99)
    return wide[:, : t.shape[1]]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 31, 33, 64])
def test_integer_products(provider, assert_same, k):
    """K = 1 leaves both strides 1: which way an operand lies cannot be told from them."""
    if provider.device == "cuda" and k % 32:
        a, b = integers(3, k), integers(5, k)
        with pytest.raises(RuntimeError, match=f"dimension {k} is not a multiple of 32"):
            provider("scaled_int_mm", a, b, torch.rand(3), torch.rand(5), None, None, torch.float32)
        return
    for m, n in itertools.product(SIZES, SIZES):
        scales = torch.rand(m), torch.rand(n)
        a, b = integers(m, k), integers(n, k)
        for dtype in (torch.float32, torch.bfloat16):
            want = reference.scaled_int_mm(a, b, *scales, None, None, dtype)
            layouts = ((a, b), (a, b.t().contiguous().t()), (strided(a, 3), strided(b, 1)))
            for first, second in layouts:
                got = provider("scaled_int_mm", first, second, *scales, None, None, dtype)
                assert_same(got, want)


def geometries(dims: int) -> list[tuple[list[int], ...]]:
    """(small, big, kernel, stride, padding, dilation) of all small convolutions.

    Where the stride leaves a remainder, several big sizes share a small one.
    """
    grid = itertools.product((1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2), (1, 2, 3, 5))
    found = []
    for k, s, p, d, n in grid:
        small = (n + 2 * p - d * (k - 1) - 1) // s + 1
        if small >= 1:
            found.append(tuple([v] * dims for v in (small, n, k, s, p, d)))
    return found


def conv_operands(geometry, batch: int, outputs: int, inputs: int):
    small, big = (torch.Size(geometry[i]).numel() * batch for i in (0, 1))
    return integers(outputs, small), integers(inputs, big), torch.rand(outputs), torch.rand(inputs)


CHANNELS = ((1, 1), (3, 1), (1, 2), (3, 2), (0, 2), (2, 0), (2, 18))


@on_cpu
@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions(provider, assert_same, dims):
    """Every geometry in one dimension, some of two; the slow sweep takes all of all."""
    for place, geometry in enumerate(geometries(dims)[:: 2 * dims - 1]):
        batch, channels = place % 3, CHANNELS[place % len(CHANNELS)]
        check_grad_weight(provider, assert_same, geometry, batch, *channels)
        check_grad_input(provider, geometry, batch, *channels)


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_all_convolutions(provider, assert_same, dims, batch):
    for geometry in geometries(dims):
        for outputs, inputs in ((0, 1), (1, 1), (1, 2), (2, 1), (2, 17), (17, 1)):
            check_grad_weight(provider, assert_same, geometry, batch, outputs, inputs)
            check_grad_input(provider, geometry, batch, outputs, inputs)


def check_grad_weight(provider, assert_same, geometry, batch, outputs, inputs):
    small, big, *scales = conv_operands(geometry, batch, outputs, inputs)
    channels_last = small.t().contiguous().t(), big.t().contiguous().t()
    tail = (*scales, batch, *geometry, 0, torch.float32)
    want = reference.conv_grad_weight(small, big, *tail)
    for operands in ((small, big), channels_last):
        assert_same(provider("conv_grad_weight", *operands, *tail), want)


def check_grad_input(provider, geometry, batch, outputs, inputs):
    """Powers of two as scales: no sum rounds, so the order in which products are added is none."""
    positions = batch * torch.Size(geometry[0]).numel()
    columns = inputs * torch.Size(geometry[2]).numel()
    rows, weight = integers(positions, outputs), integers(columns, outputs)
    scales = torch.full((positions,), 0.5), torch.full((columns,), 2.0)
    tail = (*scales, batch, *geometry, torch.float32)
    want = reference.conv_grad_input(rows, weight, *tail)
    for operands in ((rows, weight), (strided(rows, 2), weight.t().contiguous().t())):
        got = provider("conv_grad_input", *operands, *tail)
        assert torch.equal(got, want), (geometry, batch, outputs, inputs)


SMALL_LAYERS = [
    (k, s, p, n)
    for k, s, p, n in itertools.product((1, 2, 3), (1, 2, 3), (0, 1), (1, 2, 3, 4))
    if n + 2 * p >= k and n > p * (k == 1)  # some position sees more than padding
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("setting", SMALL_LAYERS[::16])
def test_small_layers(setting, channels_last):
    """Whole models: rows are views of a channels-last image, copies of another."""
    check_layer(*setting, channels_last)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_all_small_layers(channels_last):
    for setting in SMALL_LAYERS:
        check_layer(*setting, channels_last)


def check_layer(kernel, stride, padding, size, channels_last):
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Conv2d(8, 32, kernel, stride, padding).to(memory_format=layout)
    exact = copy.deepcopy(model)
    x = torch.randn(2, 8, size, size).to(memory_format=layout)
    weigh = torch.linspace(-1, 1, 32)[:, None, None]

    def loss(model, x):
        return (model(x.tanh()) * weigh).sin().sum()

    given, wanted = (x.clone().requires_grad_() for _ in range(2))
    loss(exact, wanted).backward()
    options = {"min_gain": 0, "memory": "off", "recipe": "int8", "override": {"*": "int8"}}
    _, graphs = hot_step(lambda x: loss(model, x), given, options=options)
    assert graphs[0].plan.rewritten
    pairs = ((model.weight.grad, exact.weight.grad), (given.grad, wanted.grad))
    for got, want in pairs:
        assert (got - want).norm() <= 0.1 * want.norm(), (kernel, stride, padding, size)
