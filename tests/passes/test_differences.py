"""Finite differences of one network: its uses cancel, so all that they are made of stays exact."""

import copy
from itertools import pairwise

import pytest
import torch
from samples_storage import ALL
from torch import nn
from torch.nn import functional as F

from hot_compile.passes.storage.differences import DIFFERENCED
from hot_compile.testing import cosine, hot_step

H = 0.05


def network():
    torch.manual_seed(0)
    widths = [8, 64, 64, 1]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def second(minus, middle, plus):
    return ((minus - 2 * middle + plus) / H**2 - 1).square().mean()


DIFFERENCES = {
    "first": lambda f, x: ((f(x + H) - f(x)) / H - 1).square().mean(),
    "second": lambda f, x: second(f(x + H), f(x), f(x - H)),
    "by a negative factor": lambda f, x: (
        ((f(x + H) + f(x - H) + -2 * f(x)) / H**2 - 1).square().mean()
    ),
    "alpha": lambda f, x: ((torch.sub(f(x + H), f(x), alpha=1)) / H - 1).square().mean(),
    "one batch": lambda f, x: second(*f(torch.cat([x + H, x, x - H])).chunk(3)),
    "stacked": lambda f, x: second(*f(torch.stack([x + H, x, x - H])).unbind(0)),
    "an error of two outputs": lambda f, x: 1e6 * F.mse_loss(f(x + 1e-3), f(x)),
    "of a critic": lambda f, x: f(x).mean() - f(x + H).mean(),
}


def in_double(function, f, x):
    """Gradients in fp64."""
    twin = copy.deepcopy(f).double()
    twin.zero_grad()
    function(twin, x.double()).backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_stay_exact(name):
    f, x = network(), torch.randn(256, 8)
    function = DIFFERENCES[name]
    function(f, x).backward()
    exact = [p.grad.clone() for p in f.parameters()]
    f.zero_grad()
    _, (report,) = hot_step(lambda x: function(f, x), x, options={**ALL, "min_gain": 0})
    nothing = [truth.norm() < 1e-9 for truth in in_double(function, f, x)]  # rounding, in fp32
    for p, want, cancels in zip(f.parameters(), exact, nothing, strict=True):
        assert cosine(p.grad, want) > 0.9999 or cancels
    large = [c for c in report.crossing if c.shape[-1] == "64" and c.scheme != "bits"]
    assert large
    assert {c.scheme for c in large} == {"exact"}
    assert any(d.reason == DIFFERENCED for d in report.plan)


class Again(nn.Module):
    """One layer applied four times in a row, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        for _ in range(4):
            x = x - self.down(F.gelu(self.up(self.norm(x))))
        return x


class Recurrent(nn.Module):
    """A gated unit, whose update takes a difference: h + z (n - h)."""

    def __init__(self):
        super().__init__()
        self.gate, self.new = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, x):
        h = torch.zeros_like(x[0])
        for step in x.unbind(0):
            both = torch.cat([step, h], -1)
            h = h + torch.sigmoid(self.gate(both)) * (torch.tanh(self.new(both)) - h)
        return h


@pytest.mark.parametrize(
    ("model", "x", "loss"),
    [
        (Again(), (256, 64), lambda f, x: f(x).square().mean()),
        (Recurrent(), (4, 128, 64), lambda f, x: f(x).square().mean()),
        (Again(), (256, 64), lambda f, x: f(x).square().mean() + f(x + 1).square().mean()),
        (Again(), (256, 64), lambda f, x: F.layer_norm(f(x), (64,)).abs().mean()),
    ],
)
def test_weights_used_again_are_no_difference(model, x, loss):
    _, (report,) = hot_step(
        lambda x: loss(model, x), torch.randn(x), options={**ALL, "min_gain": 0}
    )
    assert not [d for d in report.plan if d.reason == DIFFERENCED]
    assert not [c for c in report.crossing if c.reason == DIFFERENCED]
    assert [c for c in report.crossing if c.scheme != "exact"]


@pytest.mark.parametrize("reduction", ["mean", "none"])  # the head's gradients in either graph
def test_a_head_in_chunks_is_no_difference(reduction):
    """Its statistics lie one behind the other, and the loss takes one from another."""
    torch.manual_seed(0)
    words = nn.Embedding(256, 64)

    def loss(x, target):
        y = F.gelu(body[1](F.gelu(body[0](F.layer_norm(x, (64,))))))
        losses = F.cross_entropy(F.linear(body[2](y), words.weight), target, reduction=reduction)
        return (losses * weights).sum() if reduction == "none" else losses

    body = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)])
    ids, target, weights = torch.randint(256, (512,)), torch.randint(256, (512,)), torch.rand(512)
    options = {**ALL, "min_gain": 0, "keep_head": True, "head_min_bytes": 0}
    _, (report,) = hot_step(lambda ids, t: loss(words(ids), t), ids, target, options=options)
    assert [head.chunked for head in report.plan.heads] == [True]
    assert not [d for d in report.plan if d.reason == DIFFERENCED]
    assert sum(c.scheme != "exact" for c in report.crossing) >= 2
