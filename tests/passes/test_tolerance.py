"""What may be stored rounded, by class of reader: gradients stay what they are."""

import pytest
import torch
import torch.nn.functional as F
from samples_storage import Block, crossing
from torch import nn

from hot_compile.testing import cosine


def followed_by_a_layer(function, width=256):
    """A loss in which ``function`` stands between two layers, and the layers."""
    first, second = nn.Linear(64, width), nn.Linear(width, 64)
    return nn.ModuleList([first, second]), lambda x: second(function(first(x))).square().mean()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda h: 1 / (h + 3), ""),
        (lambda h: 1 / h, ""),
        (lambda h: torch.sin(30 * h), ""),
        (lambda h: torch.sin(100 * h), "steep"),
        (lambda h: torch.exp(h) + torch.exp(2 * h), ""),
        (lambda h: h.abs().sqrt(), "steep"),
        (lambda h: torch.erfinv(h.clamp(-0.999, 0.999)), ""),
        (lambda h: torch.atanh(0.3 * h.sin()) + torch.erfinv(h.sin()), ""),
        (lambda h: h / h.amax(), ""),
        (lambda h: h.amax(0, keepdim=True) * h, ""),
        (lambda h: torch.cos(h) * h.norm(dim=-1, keepdim=True), ""),
        (lambda h: h * torch.arange(256)[h.clamp(0, 255).long()], "int64"),
    ],
)
def test_what_does_not_tolerate_rounding_stays_exact(function, why):
    torch.manual_seed(0)
    layers, loss = followed_by_a_layer(function)
    x = torch.randn(64, 64)
    loss(x).backward()
    exact = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    kept = crossing(loss, x, exclude="*")
    large = [c for c in kept if c.shape == ("64", "256")]
    assert not why or any(why in c.reason for c in large), [(c.name, c.reason) for c in large]
    for p, want in zip(layers.parameters(), exact, strict=True):
        assert cosine(p.grad, want) > 0.995


@pytest.mark.parametrize(
    ("dtype", "times", "scheme"),
    [
        (torch.float32, 5, "groups12"),
        (torch.float32, 60, "groups12"),
        (torch.float32, 70, "exact"),
        (torch.bfloat16, 5, "rows8"),
        (torch.bfloat16, 9, "exact"),
    ],
)
def test_a_sines_angle_has_more_than_six_bits(dtype, times, scheme):
    """Though what it is made of is bounded. A constant counts before it is saved and after."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(3))

    def loss(x):
        first, second, third = layers
        angle = second(first(x).tanh())
        return third((times * angle).sin()).float().square().mean()

    kept = crossing(loss, torch.randn(256, 64, dtype=dtype), exclude="*")
    (angle,) = [c for c in kept if c.name in ("addmm_1", "mul")]
    assert angle.scheme == scheme


ACTIVATIONS = {
    "gelu": F.gelu, "silu": F.silu, "mish": F.mish, "relu": F.relu, "hardswish": F.hardswish,
    "leaky relu": F.leaky_relu, "relu6": F.relu6,
    "gelu by tanh": lambda h: F.gelu(h, approximate="tanh"),
    "squared relu": lambda h: F.relu(h).square(),
    "elu": F.elu, "selu": F.selu, "softplus": F.softplus, "softsign": F.softsign,
    "snake": lambda h: h + h.sin().square(), "atan": torch.atan,
    "symmetric log": lambda h: h.sign() * h.abs().log1p(),
    "inverse root": lambda h: h * torch.rsqrt(1 + h * h), "root": lambda h: (1 + h * h).sqrt(),
    "bell": lambda h: torch.exp(-h * h / 2), "narrow bell": lambda h: h * (-((3 * h) ** 2)).exp(),
}  # fmt: skip
AT_ANY_SCALE = ("gelu", "relu6", "squared relu")
"""Smooth, with two ends, with none: in the quick run the others have the usual scale only."""


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        pytest.param(n, s, marks=() if s == 1 or n in AT_ANY_SCALE else pytest.mark.slow)
        for s in (0.01, 1.0, 30.0)
        for n in ACTIVATIONS
    ],
)
def test_activations_are_stored_rounded_at_any_scale(name, spread):
    torch.manual_seed(0)
    layers, loss = followed_by_a_layer(lambda h: ACTIVATIONS[name](h * spread))
    x = torch.randn(256, 64)
    loss(x).backward()
    exact = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    kept = crossing(loss, x, exclude="*")
    hidden = [c for c in kept if c.shape == ("256", "256") and c.dtype == "float32"]
    assert hidden
    assert "exact" not in {c.scheme for c in hidden}
    for p, want in zip(layers.parameters(), exact, strict=True):
        assert cosine(p.grad, want) > 0.995


@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid])
def test_what_is_saturated_everywhere_has_no_gradient(activation):
    """Of a 1 that was restored as 0.99994 a layer in front had more of a gradient than all others,
    whose inputs were not as large."""
    torch.manual_seed(0)
    layers, loss = followed_by_a_layer(activation)
    with torch.no_grad():
        layers[0].bias += 3000
    x = 100 * torch.randn(256, 64)
    hidden = [c for c in crossing(loss, x, exclude="*") if c.shape == ("256", "256")]
    assert {c.scheme for c in hidden} == {"groups12"}
    assert not layers[0].weight.grad.any()


@pytest.mark.parametrize(
    "offset", [-4.0, *(pytest.param(n, marks=pytest.mark.slow) for n in (-2.0, 2.0)), 4.0]
)
@pytest.mark.parametrize("activation", [torch.tanh, torch.erf, F.elu, F.gelu, F.silu, F.softplus])
def test_saturated_channels_keep_their_small_gradients(activation, offset):
    torch.manual_seed(0)
    layers, loss = followed_by_a_layer(activation)
    with torch.no_grad():
        layers[0].bias[:128] += offset
    x = torch.randn(256, 64)
    loss(x).backward()
    exact = layers[0].weight.grad.clone()
    layers.zero_grad()
    crossing(loss, x, exclude="*")
    got = layers[0].weight.grad
    assert cosine(got[:128], exact[:128]) > 0.95  # far from zero, a hundredth as large
    assert cosine(got[128:], exact[128:]) > 0.99


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.log(F.relu(h) + 1e-3),
        lambda h: torch.sin(10 * h),
        F.gelu,
    ],
)
def test_four_bits_are_given_to_what_tolerates_them(function):
    torch.manual_seed(0)
    layers, loss = followed_by_a_layer(function)
    x = torch.randn(256, 64)
    loss(x).backward()
    exact = layers[0].weight.grad.clone()
    layers.zero_grad()
    crossing(loss, x, exclude="*", memory_bits=4)
    assert cosine(layers[0].weight.grad, exact) > 0.9


@pytest.mark.parametrize("loss_of", [F.mse_loss, F.l1_loss, F.smooth_l1_loss])
@pytest.mark.parametrize("act", [torch.tanh, torch.sigmoid, lambda y: y])
def test_a_loss_near_its_target_stays_exact(loss_of, act):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(128, 64)
    target = act(net(x)).detach() + 1e-3 * torch.randn(128, 256)
    loss_of(act(net(x)), target).backward()
    exact = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    crossing(lambda x, t: loss_of(act(net(x)), t), x, target, exclude="*")
    for p, want in zip(net.parameters(), exact, strict=True):
        assert cosine(p.grad, want) > 0.998


@pytest.mark.parametrize("mean", [0.0, pytest.param(3.0, marks=pytest.mark.slow), 100.0])
@pytest.mark.parametrize("norm", ["batch 1d", "batch 2d", "layer", "group"])
def test_norms_keep_their_digits_whatever_the_mean(norm, mean):
    torch.manual_seed(0)
    if norm in ("batch 1d", "layer"):
        first, last = nn.Linear(32, 64), nn.Linear(64, 16)
        middle = nn.BatchNorm1d(64) if norm == "batch 1d" else nn.LayerNorm(64)
        x = torch.randn(512, 32)
    else:
        first, last = nn.Conv2d(8, 64, 1), nn.Conv2d(64, 16, 1)
        middle = nn.BatchNorm2d(64) if norm == "batch 2d" else nn.GroupNorm(4, 64)
        x = torch.randn(16, 8, 8, 8)
    before = nn.BatchNorm1d(32, affine=False) if norm == "batch 1d" else nn.Identity()
    net = nn.Sequential(before, first, middle, nn.SiLU(), last)
    with torch.no_grad():
        first.bias += mean
    weight = torch.randn_like(net(x))
    (net(x) * weight).sum().backward()
    exact = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    kept = crossing(lambda x, w: (net(x) * w).sum(), x, weight, exclude="*")
    assert any(c.scheme not in ("exact", "bits") for c in kept)
    for p, want in zip(net.parameters(), exact, strict=True):
        if p is not first.bias and want.norm() > 1e-4:
            assert cosine(p.grad, want) > 0.995


@pytest.mark.parametrize("gain", [1.0, 8.0, 20.0])
def test_attention_with_large_logits_keeps_its_gradient(gain):
    torch.manual_seed(0)
    block = Block(width=128)
    with torch.no_grad():
        block.q.weight *= gain
        block.kv.weight[:128] *= gain
        block.kv.bias[3:128:32] += 30.0  # a key's offset, which the softmax does not see
    x, weight = torch.randn(4, 48, 128), torch.randn(4, 48, 128)
    (block(x) * weight).mean().backward()
    exact = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad()
    crossing(lambda x, w: (block(x) * w).mean(), x, weight, exclude="*")
    for n, p in block.named_parameters():
        if n != "kv.bias":
            assert cosine(p.grad, exact[n]) > 0.99, n


class Attention(nn.Module):
    """Queries, keys and values of one layer each, or of one that is split."""

    def __init__(self, packed, width=128):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, width)
        sizes = [3 * width] if packed else [width] * 3
        self.layers = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, x):
        y = self.norm(x)
        whole = [layer(y) for layer in self.layers]
        parts = whole[0].chunk(3, -1) if len(whole) == 1 else whole
        q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("packed", [True, False])
def test_values_of_an_attention_take_8_bits_of_16(packed):
    """Values that share memory with queries and keys stay: it would be kept for these."""
    torch.manual_seed(0)
    block = Attention(packed)
    x, weight = torch.randn(4, 48, 128), torch.randn(4, 48, 128)

    def loss(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (block(x) * w).mean()

    loss(x, weight).backward()
    exact = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad()
    heads = [c for c in crossing(loss, x, weight, exclude="*") if len(c.shape) == 4]
    stored = [c.scheme for c in heads if c.scheme != "exact"]
    assert stored == ([] if packed else ["rows8"]), heads
    assert any("shares memory" in c.reason for c in heads) is packed
    for n, p in block.named_parameters():
        if p.dim() > 1:  # a key's bias has no gradient
            assert cosine(p.grad, exact[n]) > 0.99, n
