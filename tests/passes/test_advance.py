"""The cut moves past what tolerates no rounding: the results cross instead, compressed."""

import pytest
import torch
import torch.nn.functional as F
from samples_storage import crossing, crossing_right
from torch import nn

from hot_compile.testing import cosine

WIDTH, TOKENS = 64, 48


class Normed(nn.Module):
    """A norm on the whole of a layer's output behind GELU, or on a part of it."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.wide, self.narrow = nn.Linear(WIDTH, parts * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        first, *rest = F.gelu(self.wide(x)).chunk(self.parts, dim=-1)
        first = self.norm(first)
        for part in rest:
            first = first * part
        return x + self.narrow(first)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_norm_on_a_part_of_what_is_saved(parts):
    torch.manual_seed(0)
    model = nn.Sequential(Normed(parts), Normed(parts))
    x = torch.randn(4, TOKENS, WIDTH)

    def loss(x):
        return model(x).sin().mean()

    found = crossing_right(model, loss, x, floor=0.98)
    large = [c for c in found if c.bytes_before >= x.numel()]
    assert all("a loss" in c.reason for c in large if c.scheme == "exact"), large


class Attention(nn.Module):
    """Written by hand, with a bias on the scores whose gradient sums over few windows."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(2, TOKENS, TOKENS) / 10)

    def forward(self, x):
        q, k, v = (
            self.qkv(F.layer_norm(x, (WIDTH,)))
            .reshape(-1, TOKENS, 3, 2, WIDTH // 2)
            .permute(2, 0, 3, 1, 4)
        )
        scores = q * (WIDTH // 2) ** -0.5 @ k.transpose(-2, -1) + self.bias
        mixed = scores.softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("batch", [2, 20])
def test_biased_scores_cross_as_their_softmax(batch):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(batch, TOKENS, WIDTH)

    def loss(x):
        return model(x).sin().mean()

    loss(x).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    large = [c for c in crossing(loss, x) if c.bytes_before >= batch * 2 * TOKENS**2]
    assert all("a loss" in c.reason for c in large if c.scheme == "exact"), large
    for name, p in model.named_parameters():
        got, want = p.grad, exact[name]
        if name.endswith("qkv.bias"):  # that of keys is rounding: a softmax ignores what rows share
            got, want = (t.view(3, -1)[[0, 2]] for t in (got, want))
        assert cosine(got, want) > 0.98, name


class Modulated(nn.Module):
    """A norm in fp32 of what is narrower, scaled and shifted by what a sample's time says."""

    def __init__(self, shift="layer"):
        super().__init__()
        self.by, self.shift = shift, nn.Linear(WIDTH, 2 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, time):
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        scale, shift = self.shift(time).unsqueeze(1).chunk(2, -1)
        if self.by == "mean":
            shift = -normed.mean(1, keepdim=True)
        y = (normed * (1 + scale.float()) + shift.float()).to(x.dtype)
        return x + self.narrow(F.gelu(self.wide(y)))


def modulated(shift, **options):
    """What crosses, as large as x, of two such blocks in bf16, by the module that made it."""
    torch.manual_seed(0)
    first, second = (Modulated(shift).bfloat16() for _ in range(2))
    x, time = (torch.randn(4, *size, WIDTH, dtype=torch.bfloat16) for size in ((TOKENS,), ()))

    def loss(x, time):
        return second(first(x, time), time).float().square().mean()

    loss(x, time).backward()
    exact = {name: p.grad.clone() for name, p in (*first.named_parameters(),)}
    first.zero_grad()
    found = [c for c in crossing(loss, x, time, **options) if c.bytes_before >= 2 * x.numel()]
    for name, p in first.named_parameters():
        assert cosine(p.grad, exact[name]) > 0.98, name
    return [c for c in found if "a loss" not in c.reason]


def test_a_norm_whose_shift_a_layer_makes_crosses_rounded_though_it_is_wider():
    assert all(c.scheme != "exact" for c in modulated("layer"))
    assert any(c.dtype == "float32" for c in modulated("layer"))


def test_what_is_less_its_own_mean_stays_exact():
    assert any("may cancel it" in c.reason for c in modulated("mean"))


def test_with_a_budget_nothing_wider_crosses():
    found = modulated("layer", memory_budget=0.9)
    assert all(c.dtype == "bfloat16" for c in found)


class Joined(nn.Module):
    """The end of a ResNet's first block of a stage: two batch norms' results are added up."""

    def __init__(self, channels=16):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        one, other = (norm(conv(x)) for norm, conv in zip(self.norms, self.convs, strict=True))
        return F.relu(one + other)


def test_a_sum_of_two_is_saved_for_both():
    """Three in 8 bits for two in 16; for one of them alone it would be two for one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Joined(), Joined(), Joined()), torch.randn(8, 16, 16, 16)

    def loss(x):
        return model(x).float().square().mean()

    found = crossing_right(model, loss, x, floor=0.99, dtype=torch.bfloat16)
    inner = [c for c in found if c.bytes_before >= 2 * x.numel() and not c.module.startswith("2")]
    assert [c.module for c in inner if c.scheme == "exact"] == [], inner
    assert len(inner) == 2 * 3  # the last block's sum is what the loss reads
