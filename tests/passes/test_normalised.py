"""q and k are rounded only where something bounds the logits: a norm, weights, a tanh."""

import pytest
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from hot_compile.passes.storage.normalised import summed_by_softmax
from hot_compile.testing import cosine, hot_step

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
    _, reports = hot_step(model, x, options={"memory_min_bytes": 0})
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


class Saturated(Attention):
    """Attention whose softmax is nearly one-hot, on values with a large mean.

    Its gradient of q and k is what is left of each row when the mean by its probabilities is taken
    away: a stored row that sums to 1.0002 would leave that much of the mean.
    """

    def __init__(self, weighted):
        super().__init__(nn.LayerNorm(WIDTH))
        self.weighted, self.bias = weighted, nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.qkv.weight, std=0.6)
        nn.init.constant_(self.qkv.bias[2 * WIDTH :], 100.0)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = self.weighted(q, k, v, self.bias)
        return (x + self.out(y.transpose(1, 2).flatten(-2))).square().mean()


def by_hand(q, k, v, bias):
    """Of this the powers of e cross, not the probabilities."""
    return (6 * q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def masked(q, k, v, bias):
    """Of this what a whole row's mask leaves of the probabilities."""
    mask = torch.zeros(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask + bias)


def transposed(q, k, v, bias):
    """Its sums go along the rows of what crosses, or along its columns."""
    return (6 * k @ q.transpose(-1, -2) + bias).softmax(-2).transpose(-1, -2) @ v


@pytest.mark.parametrize(
    ("weighted", "length", "lower"),
    [
        *(
            (weighted, length, False)
            for weighted in (by_hand, masked, transposed)
            for length in (50, 192)
        ),
        pytest.param(masked, 64, True, marks=pytest.mark.slow),
    ],
)
def test_restored_rows_of_a_saturated_softmax_sum_to_what_they_did(weighted, length, lower):
    torch.manual_seed(0)
    model, x = Saturated(weighted), torch.randn(4, length, WIDTH)
    model(x).backward()
    exact, model.qkv.weight.grad = model.qkv.weight.grad, None
    # lowered, nothing smaller is stored than what the test is about: Inductor takes seconds for it
    smallest = 16 * length**2 * 4 if lower else 0
    _, reports = hot_step(model, x, options={"memory_min_bytes": smallest}, lower=lower)
    square = (str(length), str(length))
    assert "groups12" in [c.scheme for r in reports for c in r.crossing if c.shape[-2:] == square]
    for got, want in zip(model.qkv.weight.grad.chunk(3), exact.chunk(3), strict=True):
        assert cosine(got, want) > 0.999  # from 0.95 where 12 bits alone restore them


def softmax(x, dim=-1):
    powers = (x - x.amax(dim, True)).exp()
    return powers / powers.sum(dim, True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: softmax(x), (2, True)),
        (lambda x: softmax(x).half(), (2, True)),
        (lambda x: softmax(x).view(16, 8), (1, True)),
        (lambda x: softmax(x).permute(0, 2, 1).clone(), (1, True)),
        (lambda x: softmax(x, 1).permute(2, 1, 0), (1, True)),
        (lambda x: softmax(x).masked_fill(torch.ones(8, 8).triu(1).bool(), 0.0), (2, False)),
        (lambda x: softmax(x).view(2, 64), None),
        (lambda x: softmax(x)[..., :4], None),
        (lambda x: softmax(x) * x, None),
        (lambda x: x / x.sum(-1, True), None),
        (lambda x: x.exp(), None),
    ],
)
def test_which_sums_a_softmax_relies_on(function, expected):
    graph = make_fx(function, get_decompositions([torch.ops.aten.masked_fill]))(
        torch.randn(2, 8, 8)
    ).graph
    assert summed_by_softmax(graph.output_node().args[0]) == expected


def test_powers_of_e_are_divided_by_their_sum():
    graph = make_fx(lambda x: softmax(x))(torch.randn(2, 8, 8)).graph
    (powers,) = graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    assert summed_by_softmax(powers) == (2, False)
