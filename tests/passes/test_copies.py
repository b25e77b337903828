"""What is computed of x and of its copy, once: equal to the last bit, and less crosses exact."""

import pytest
import torch
from samples_storage import ALL
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.storage.copies import copies_first, drop_ones, merge_copies
from hot_compile.testing import cosine, hot_step

SUB, MUL = aten.sub.Tensor, aten.mul.Tensor


def traced(function, *inputs):
    """The graph of ``function`` with fake values, as joint graphs are."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def count(gm, target):
    return len(gm.graph.find_nodes(op="call_function", target=target))


def both(x, mean, rstd, g):
    """What a norm on transposed x makes: a forward of the copy, a backward of x."""
    x = x.sin().transpose(1, 2)
    copy = x.clone(memory_format=torch.contiguous_format)
    y = (copy - mean) * rstd
    return y.sum(1), g * ((x - mean) * rstd), (x * 2).sum()


INPUTS = (torch.randn(3, 8, 5), torch.randn(3, 5, 1), torch.rand(3, 5, 1), torch.randn(3, 5, 8))


def test_two_become_one_and_values_stay_to_the_last_bit():
    gm = traced(both, *INPUTS)
    want = gm(*INPUTS)
    assert (count(gm, SUB), count(gm, MUL)) == (2, 4)
    assert merge_copies(gm.graph) == 2
    gm.graph.lint()
    gm.recompile()
    assert (count(gm, SUB), count(gm, MUL)) == (1, 3)
    for got, expected in zip(gm(*INPUTS), want, strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: ((c := x.sin().t()).clone(memory_format=torch.contiguous_format) - m, c - m),
        lambda x, m: ((c := x.sin().t()).contiguous() - m, (m - c).sum()),
        lambda x, m: ((c := x.sin().t()).contiguous() - m, (c - m).as_strided((3,), (8,)).sum()),
        lambda x, m: ((c := x.sin()).clone() - m, (c - m).sum()),  # contiguous already
        lambda x, m: ((c := x.sin().t()).contiguous().sum(), c.sum()),  # no pointwise operator
    ],
)
def test_what_differs_is_returned_or_read_by_strides_stays(function):
    gm = traced(function, torch.randn(5, 8), torch.randn(()))
    nodes = len(gm.graph.nodes)
    assert merge_copies(gm.graph) == 0
    assert len(gm.graph.nodes) == nodes


def test_casts_move_behind_what_they_are_of_and_values_stay():
    def function(x, w, a):
        h = x.sin()
        y = h @ w
        return y, (h.double().t() @ a), w.double()

    given = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 2, dtype=torch.float64)
    gm = traced(function, *given)
    want = gm(*given)
    assert copies_first(gm.graph) == 1  # h's; w's stays behind the inputs
    gm.graph.lint()
    gm.recompile()
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)[:1]
    casts = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert [cast < product for cast in casts] == [True, False]
    assert all(map(torch.equal, gm(*given), want))
    assert copies_first(gm.graph) == 0


class Mixing(nn.Module):
    """A Mixer's block: one product along tokens, one along channels, norms on transposed sums."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.tokens, self.channels = nn.Linear(48, 48), nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mixer_holds_nothing_large_exact(lower):
    torch.manual_seed(0)
    blocks = 1 if lower else 2  # compiling takes its time for each
    model, x = nn.Sequential(*(Mixing() for _ in range(blocks))), torch.randn(4, 48, 64)

    def loss(x):
        return model(x).sin().mean()

    loss(x).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    _, (graph,) = hot_step(loss, x, options=ALL, lower=lower)
    large = [c for c in graph.crossing if c.bytes_before >= x.numel()]
    assert large
    assert all("a loss" in c.reason for c in large if c.scheme == "exact"), large
    for name, p in model.named_parameters():
        assert cosine(p.grad, exact[name]) > 0.99, name


def test_a_product_with_one_is_what_is_multiplied():
    def function(given, n):
        x = given.neg()
        shown, of_input = x * 1, (given.t() * 1).exp()
        y, z, cast = x * 1, (x / 1.0).exp(), n * 1.0
        others = shown.exp(), cast.exp(), (x.t().expand(2, 5, 3) * 1).exp(), (x * 2).exp()
        return (y > 0).float() + z, shown, of_input, (x * 1).sin(), *others

    inputs = (torch.randn(3, 5), torch.arange(4))
    gm = traced(function, *inputs)
    want = gm(*inputs)
    assert drop_ones(gm.graph) == 2  # not of inputs, what users get, casts, other strides, sines
    gm.recompile()
    got = gm(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (count(gm, MUL), count(gm, aten.div.Tensor)) == (6, 0)
