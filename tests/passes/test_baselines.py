"""The papers' baselines: their arithmetic against its definition, and in the graph."""

import pytest
import torch
from torch import nn

from hot_compile.inspect import explain
from hot_compile.passes.layers import baselines
from hot_compile.runtime.reference.arithmetic import transform_rows
from hot_compile.testing import cosine, hot_step

OPTIONS = {"min_gain": 0, "keep_head": False}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_luq_takes_seven_powers_of_two_and_zero():
    g = torch.randn(64, 64) * torch.rand(64, 1).pow(4)
    q = baselines.luq(g)
    levels = q.abs().unique() / g.abs().max()
    assert set(levels.tolist()) <= {0.0, *(2.0**-k for k in range(7))}
    assert len(levels) == 8
    assert torch.equal(q.sign()[q != 0], g.sign()[q != 0])


def test_luq_is_unbiased():
    """The mean over many places of one value is the value, above and below the smallest level."""
    for value in (0.002, 0.011, 0.3, 0.71, 0.99):
        g = torch.full((256, 256), value)
        g[0, 0] = 1.0
        noise = 1 + 1e-4 * torch.randn_like(g)  # the hash sees value and place
        q = baselines.luq(g * noise)
        assert float(q.flatten()[1:].mean()) == pytest.approx(value, rel=0.03)


@pytest.mark.parametrize("zero", [True, False])
def test_degenerate_gradients(zero):
    g = torch.zeros(8, 8)
    if not zero:
        g[3, 3] = 2.0
    assert torch.equal(baselines.luq(g), g)
    assert torch.equal(baselines.int4_per_tensor(g, True), g)


def test_int4_has_fifteen_levels():
    q = baselines.int4_per_tensor(torch.randn(64, 64), False)
    assert len(q.unique()) == 15
    clipped = baselines.int4_sawb(torch.randn(256, 256))
    assert len(clipped.unique()) == 15
    assert float(clipped.abs().max()) < 3.0  # SAWB clips a Gaussian at about 2.4 sigma


def test_low_pass_expand_is_the_transpose():
    a, b = torch.randn(50, 6), torch.randn(32, 6)
    left = (transform_rows(a, 8, 1) * b).sum()
    right = (a * baselines.low_pass_expand(b, 8, 50)).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-4)
    whole = baselines.low_pass_expand(transform_rows(a, 16, 1), 16, 50)
    torch.testing.assert_close(whole, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("method", ["int4-naive", "luq", "lbp-wht"])
def test_operators_pass_opcheck(op, method):
    g, other = torch.randn(40, 24), torch.randn(24, 16)
    other = other if op == "grad_input" else torch.randn(40, 16)
    target = getattr(torch.ops.hot_baseline, op).default
    torch.library.opcheck(target, (g.t().contiguous().t(), other, method, 8))


@pytest.mark.parametrize(
    ("recipe", "floor", "lower"),
    [
        ("int4-naive", 0.7, False),
        pytest.param("luq", 0.7, True, marks=pytest.mark.slow),
        ("lbp-wht", 0.4, False),
        pytest.param("int4-naive", 0.7, True, marks=pytest.mark.slow),
        pytest.param("lbp-wht", 0.4, True, marks=pytest.mark.slow),
    ],
)
def test_in_the_graph(recipe, floor, lower):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    x = torch.randn(64, 64)
    model(x).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = {**OPTIONS, "recipe": recipe}
    _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options=options, lower=lower)
    assert {str(d.strategy) for d in graph.plan} == {recipe}
    for got, want in zip((p.grad for p in model.parameters()), exact, strict=True):
        assert cosine(got, want) > floor
    weights = model[0].weight.grad, exact[0]
    assert cosine(*weights) < 0.9999  # really rewritten


def test_conv1d_form_frozen_weights_and_the_head():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 48))
            self.frozen = nn.Linear(48, 32).requires_grad_(False)

        def forward(self, x):
            return self.frozen(x @ self.weight).tanh()

    model, x = Conv1D(), torch.randn(64, 64)
    model(x).sum().backward()
    want = model.weight.grad.clone()
    model.zero_grad()
    hot_step(lambda x: model(x).sum(), x, options={**OPTIONS, "recipe": "luq"})
    assert cosine(model.weight.grad, want) > 0.7
    plan = explain(nn.Sequential(model, nn.Linear(32, 10)), x, options={"recipe": "luq"}).plan
    assert plan["1"].strategy == "exact"
    assert plan["0.frozen"].strategy == "luq"


def test_paper_per_token_everywhere():
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(64, 64)
    for value in (True, False):
        options = {**OPTIONS, "recipe": "paper", "per_token": value}
        plan = explain(model, x, options=options).plan
        assert [d.per_token for d in plan] == [value, value]
