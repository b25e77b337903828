"""Masks are made in the forward, of what is not rounded, and kept as bits."""

import pytest
import torch
import torch.nn.functional as F
from samples_storage import crossing, crossing_right
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten, makes_bool, placeholders
from hot_compile.passes.storage.masks import compared_in, kept_for, mask_of
from hot_compile.passes.storage.readers import facts, read


class Between(nn.Module):
    """A layer, something between that has masks, and a layer."""

    def __init__(self, between, width=64):
        super().__init__()
        self.first = nn.Linear(width, 4 * width, bias=False)
        self.second = nn.Linear(4 * width, width, bias=False)
        self.register_buffer("low", torch.tensor(-0.7))
        self.register_buffer("high", torch.tensor(0.9))
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x), self)).square().mean()


def of_hidden(found, x):
    """Of what crosses, that which has the size of the first layer's result."""
    return [c for c in found if c.shape == (str(len(x)), "256")]


def hidden(model, x):
    return of_hidden(crossing(model, x, exclude="*"), x)


def hidden_right(model, x):
    """As ``hidden``; gradients are right."""
    return of_hidden(crossing_right(model, model, x, floor=0.999, exclude="*"), x)


@pytest.mark.parametrize(
    ("between", "passes"),
    [
        pytest.param(
            lambda x, m: x.clamp(m.low, m.high), lambda x: (x > -0.7) & (x < 0.9), id="0-d"
        ),
        pytest.param(lambda x, m: torch.maximum(x, m.low), lambda x: x > -0.7, id="maximum"),
        pytest.param(lambda x, m: F.relu6(x), lambda x: (x > 0) & (x < 6), id="relu6"),
        pytest.param(lambda x, m: F.hardtanh(x, -0.5, 0.5), lambda x: x.abs() < 0.5, id="hardtanh"),
    ],
)
def test_nothing_passes_where_nothing_did(between, passes):
    torch.manual_seed(0)
    model = Between(between)
    x = torch.eye(64) * 8  # so that the layer's gradient shows which of its outputs passed
    found = hidden(model, x)
    assert {c.scheme for c in found} - {"bits"} == {"rows8_mask"}
    dead = ~passes(model.first(x)).t()
    assert 0 < dead.sum() < dead.numel()
    assert torch.equal(model.first.weight.grad == 0, dead)


def test_both_ends_of_a_clamp_are_one_mask():
    torch.manual_seed(0)
    found = hidden(Between(lambda x, m: F.relu6(x)), torch.randn(128, 64))
    assert [(c.scheme, c.bytes) for c in found] == [("rows8_mask", 128 * 256 + 128 * 2)]


def test_what_is_the_largest_of_its_row_is_known_though_it_is_rounded():
    """Gradients of a largest value go where it was, and are split where it was twice."""
    torch.manual_seed(0)
    model = Between(lambda x, m: x * x.amax(0, keepdim=True))
    x = torch.randn(64, 64).repeat(2, 1)
    found = hidden_right(model, x)
    assert all(c.scheme != "exact" for c in found), found


def test_too_many_masks_are_worth_no_storing():
    def between(x, model):
        return sum(x.clamp(model.low * n, model.high * n) for n in range(1, 6))

    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = hidden(Between(between), torch.randn(128, 64))
    assert found.scheme == "exact"
    assert "masks are made of it: too many bits" in found.reason


def graph_of(backward, *shapes):
    """Of a function of a gradient, what was saved, and more."""
    graph = make_fx(backward, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    graph.eliminate_dead_code()
    return graph, placeholders(graph)


@pytest.mark.parametrize(
    "between",
    [
        lambda x, m: x.clamp(x.mean(), x.mean() + 0.1) * x,
        lambda x, m: torch.where(x > 0, torch.where((x > 0) & (x < 1), x, 2 * x), 3 * x),
    ],
)
def test_a_mask_may_be_part_of_another_and_kept_by_itself(between):
    torch.manual_seed(0)
    model = Between(between)
    x = torch.randn(128, 64)
    found = hidden_right(model, x)
    assert all(c.scheme != "exact" for c in found), found


def test_a_mask_of_masks_is_kept_where_nothing_else_reads_them():
    def many(g, x, low):
        above, below, even = x > low, x < 2, x != 1
        both, neither = above & below, ~below
        return (torch.where(m, g, 0) for m in (both, neither, even, even & above))

    graph, (_, x, low) = graph_of(lambda *given: tuple(many(*given)), (8, 4), (8, 4), (4,))
    masks = [n for n in graph.nodes if makes_bool(n)]
    above, below, even, both, neither, last = masks
    assert set(kept_for(above, None)) == {both, last}
    assert set(kept_for(below, None)) == {both, neither}
    assert kept_for(even, None) == [even]  # and what is made of it, for what else that is made of
    assert kept_for(above, {x.name: x}) == []
    assert compared_in(both) is x
    forward = {x.name: low, low.name: x}  # whatever has these names
    mask = mask_of(both, forward)
    assert mask.compared is low
    assert mask.operands == ((x, low), (low, x))
    assert mask.parts == {above, below, both}


def test_a_mask_of_a_larger_one_is_not_kept_for_it():
    def both(g, x, y):
        return torch.where((x > 0) & (y > 0), g, 0)

    graph, _ = graph_of(both, (8, 4), (8, 1), (8, 4))
    narrow, wide, of_both = (n for n in graph.nodes if makes_bool(n))
    assert kept_for(narrow, None) == [narrow]
    assert kept_for(wide, None) == [of_both]


@pytest.mark.parametrize(
    ("backward", "why"),
    [
        (lambda g, x, y: torch.where(x > y, g, 0), "compared with more elements"),
        (lambda g, x, y: torch.where(x > y.sum(0), g, 0), "compared as the forward cannot"),
        (lambda g, x, y: torch.where(x > g, g, 0), "not known to tolerate"),
    ],
)
def test_what_the_forward_cannot_compare_stays_exact(backward, why):
    graph, (g, x, y) = graph_of(backward, (8, 4), (1, 4), (8, 4))
    g.name = g.target = "tangents_1"
    known = facts(graph, {x.name, y.name}, forward={x.name: x, y.name: y})
    assert why in read(x, known).refusal


def test_what_two_kernels_may_round_otherwise_is_not_found_equal():
    def largest(g, a, b):
        x = torch.mm(a, b)
        y = F.gelu(x)
        one, other = x == x.amax(0, True), y == y.amax(0, True)
        return g * one, g * other, g * (y > y.amax(0, True))

    graph, _ = graph_of(largest, (8, 4), (8, 16), (16, 4))
    one, other, above = (n for n in graph.nodes if makes_bool(n))
    forward = {n.name: n for n in graph.nodes}
    assert kept_for(one, forward) == [one]
    assert kept_for(other, forward) == []
    assert kept_for(above, forward) == [above]


def test_a_comparison_of_a_list_is_not_made_again():
    def among(g, x):
        return torch.where(torch.isin(x, x[0]), g, 0)

    graph, (_, x) = graph_of(among, (8, 4), (8, 4))
    assert aten.isin.Tensor_Tensor in {n.target for n in graph.nodes}
    assert read(x, facts(graph, {x.name})).refusal
