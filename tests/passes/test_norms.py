"""Norms by plain operators: the same, and their backward reads what they made of their input."""

import math

import pytest
import torch
import torch.nn.functional as F
from samples_storage import crossing_right
from torch import nn

from hot_compile.passes.exact import norms
from hot_compile.testing import hot_step

SHAPES = [((4, 32, 7, 5), 8), ((3, 12), 4), ((2, 6, 9), 6), ((2, 8, 3, 4, 5), 1), ((1, 15, 17), 5)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_norm_and_its_gradient(shape, groups, affine, dtype):
    torch.manual_seed(0)
    channels = shape[1]
    x = (3 * torch.randn(shape, dtype=torch.float64) + 5).to(dtype)
    vectors = [torch.randn(channels).to(dtype) for _ in range(2 * affine)]
    grad = torch.randn(shape).to(dtype)
    truth = [t.double().requires_grad_() for t in (x, *vectors)]
    want = F.group_norm(truth[0], groups, *truth[1:])
    want.backward(grad.double())
    weight, bias = vectors or (None, None)
    sizes = shape[0], channels, math.prod(shape[2:]), groups
    got, mean, rstd = norms.group_norm(x, weight, bias, *sizes, 1e-5)
    asked = [True, affine, affine]
    grads = norms.group_norm_backward(grad, x, mean, rstd, weight, *sizes, asked)
    off = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert got.dtype is dtype
    assert (got - want).norm() / want.norm() < off
    for found, exact in zip(filter(lambda g: g is not None, grads), truth, strict=True):
        assert found.dtype is dtype
        assert (found.double() - exact.grad).norm() / exact.grad.norm() < off


def test_a_batch_of_none():
    model, x = nn.GroupNorm(2, 8), torch.randn(0, 8, 4, requires_grad=True)
    hot_step(lambda x: model(x).sum(), x)
    assert x.grad.shape == x.shape
    assert not model.weight.grad.any()


class Block(nn.Module):
    """A UNet's: what the first norm reads goes into a convolution beside it, too."""

    def __init__(self, channels, out):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, c) for c in (channels, out))
        self.convs = nn.ModuleList(nn.Conv2d(c, out, 3, padding=1) for c in (channels, out))
        self.beside = nn.Conv2d(channels, out, 1)

    def forward(self, x):
        h = self.convs[0](F.silu(self.norms[0](x)))
        return self.beside(x) + self.convs[1](F.silu(self.norms[1](h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.down, self.up = Block(32, 64), Block(96, 32)
        self.norm = nn.GroupNorm(8, 32)
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x):
        h = self.stem(x)
        h = self.up(torch.cat([h, self.down(h)], 1))
        return self.head(F.silu(self.norm(h)))


@pytest.mark.parametrize("last", [False, True])
def test_16_bits_are_stored_as_what_norms_make(last):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 32, 32)
    y = torch.randn_like(x)
    if last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))

    def loss(x, y):
        return (model(x).float() - y.float()).square().mean()

    found = crossing_right(model, loss, x, y, floor=0.995, dtype=torch.bfloat16)
    held = sum(c.bytes for c in found)
    # of the five norms' inputs 8 bits each, none of them twice
    assert held < 0.55 * 2 * 4 * 1024 * (32 + 64 + 96 + 32 + 32) + 2**18
    images = [c for c in found if c.shape[1] != "3"]  # of what is made of them, not the result
    assert not any("cancel" in c.reason for c in images), images


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norms_on_a_cpu_keep_what_they_made(affine):
    torch.manual_seed(0)
    norm = nn.LayerNorm(64, elementwise_affine=affine)
    model, x = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 32)), torch.randn(8, 96, 64)

    def loss(x):
        return model(x).float().sin().sum()

    found = crossing_right(model, loss, x, floor=0.995, dtype=torch.bfloat16)
    (made,) = [c for c in found if c.module.startswith("1") and c.bytes_before >= x.numel()]
    assert (made.dtype, made.scheme) == ("float32", "rows8")


def test_without_exact_forms_the_norm_is_torchs(monkeypatch):
    taken = []
    own = norms.group_norm_backward
    monkeypatch.setattr(
        norms, "group_norm_backward", lambda *args: (taken.append(1), own(*args))[1]
    )
    model, x = nn.GroupNorm(4, 16), torch.randn(2, 16, 33, requires_grad=True)
    for forms in (True, False):
        hot_step(lambda x: model(x).sin().sum(), x, options={"exact_forms": forms})
        assert bool(taken) is forms
        taken.clear()
