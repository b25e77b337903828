"""q and k are rounded only where something bounds the logits: a norm, weights, a tanh."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hot_compile.testing import hot_step

WIDTH = 64


class Attention(nn.Module):
    """Four heads on what ``before`` makes of x."""

    def __init__(self, before=None):
        super().__init__()
        self.before = before or nn.Identity()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.out(y.transpose(1, 2).flatten(-2)).square().mean()


class Batch(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Group(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


BOUNDED = {
    "layer norm": nn.LayerNorm(WIDTH),
    "RMS norm": nn.RMSNorm(WIDTH),
    "batch norm": Batch(WIDTH),
    "group norm": Group(8, WIDTH),
    "group norm without weights": Group(8, WIDTH, affine=False),
    "tanh": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "norm, then a layer": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "embedding": nn.Embedding(32, WIDTH),
}
UNBOUNDED = {
    "data": None,
    "data times weights": nn.Linear(WIDTH, WIDTH),
    "a branch beside the norm": lambda x: x + F.layer_norm(x, (WIDTH,)),
    "rectified": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def of_softmax(model, x):
    """Reasons of what stays exact for a softmax's sake, and how much is stored in 12 bits."""
    torch.manual_seed(0)
    _, reports = hot_step(model, x, options={"memory": "all", "memory_min_bytes": 0})
    crossing = [c for report in reports for c in report.crossing]
    reasons = [c for c in crossing if "no norm bounds" in c.reason]
    return len(reasons), sum(c.scheme == "groups12" for c in crossing)


@pytest.mark.parametrize("name", BOUNDED)
def test_behind_a_bound_12_bits(name):
    ids = name == "embedding"
    x = torch.randint(32, (2, 48)) if ids else torch.randn(2, 48, WIDTH)
    exact, rounded = of_softmax(Attention(BOUNDED[name]), x)
    assert exact == 0
    assert rounded >= 2


@pytest.mark.parametrize("name", UNBOUNDED)
def test_of_data_as_it_comes_exact(name):
    before = UNBOUNDED[name]
    before = Call(before) if callable(before) and not isinstance(before, nn.Module) else before
    exact, rounded = of_softmax(Attention(before), torch.randn(2, 48, WIDTH))
    assert exact >= 2
    assert rounded == 0
