"""The gradient of rows' weights from their layer's input: right, and its result crosses no more."""

import pytest
import torch
from samples_experts import gradients, loss_of, routed
from samples_graphs import forms_pay

from hot_compile.passes.exact import few_rows, permutations, weighted_rows
from hot_compile.testing import cosine, hot_step

EXACT = {"min_gain": 99, "memory": "off"}  # layers stay exact
STORED = {"memory": "all", "memory_min_bytes": 1024}
NAME = "rows' weights by their layer's input"
KINDS = [{}, {"masked": True}, {"wide": True}, {"masked": True, "wide": True}, {"top": 8}]


@pytest.mark.parametrize("facts", KINDS)
@pytest.mark.parametrize("options", [EXACT, STORED])
def test_gradients_are_right(monkeypatch, facts, options):
    took = forms_pay(monkeypatch, weighted_rows, permutations, few_rows)
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    model, x = routed(**facts)
    own = gradients(model, x)
    truth = gradients(model.float(), x.float())
    model.to(torch.bfloat16).zero_grad()
    hot_step(loss_of(model), x, options=options)
    assert took[0].count(NAME) == 1
    for name, p in model.named_parameters():
        stock = cosine(own[name], truth[name])
        least = min(0.99, stock - 0.01) if options is STORED else stock - 2e-4
        assert cosine(p.grad.float(), truth[name]) > least, (name, stock)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "facts", [{"masked": True, "top": 8}, pytest.param({"wide": True}, marks=pytest.mark.slow)]
)
def test_compiled_twice_the_gradients_are_the_same(monkeypatch, facts, device):
    """Nothing is added by atomic operations, in whatever order they come."""
    forms_pay(monkeypatch, weighted_rows, permutations, few_rows)
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    model, x = routed(device, rows=1000, experts=9, **facts)
    truth = gradients(model.float(), x.float())
    model.to(torch.bfloat16)
    found = []
    for _ in range(2):
        model.zero_grad()
        hot_step(loss_of(model), x, options=EXACT, lower=True)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, got in found[0].items():
        assert cosine(got.float(), truth[name]) > 0.995, name
        assert torch.equal(got, found[1][name]), name


def test_what_experts_make_crosses_no_more(monkeypatch):
    shapes = []
    for modules in ((permutations,), (permutations, weighted_rows)):
        with monkeypatch.context() as patched:
            forms_pay(patched, *modules)
            model, x = routed(inner=48)
            _, (graph,) = hot_step(loss_of(model), x, options=STORED)
        shapes.append([tuple(map(int, c.shape)) for c in graph.crossing])
    results = [found.count((192, 64)) for found in shapes]
    assert results == [1, 0]


@pytest.mark.parametrize(
    "facts",
    [
        {"inner": 96},  # wider than the result
        {"dtype": torch.float16},  # its gradient might leave the range
    ],
)
def test_where_it_does_not_apply(monkeypatch, facts):
    took = forms_pay(monkeypatch, weighted_rows)
    dtype = facts.pop("dtype", torch.bfloat16)
    model, x = routed(**facts)
    if dtype is torch.float16:
        monkeypatch.setattr(weighted_rows, "_FLOATS", {torch.float32})
    hot_step(loss_of(model), x, options=EXACT)
    assert took == [[]]


def test_a_result_that_is_read_otherwise_keeps_its_own(monkeypatch):
    took = forms_pay(monkeypatch, weighted_rows)
    model, x = routed()
    own = torch._grouped_mm
    seen = []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: seen.append(own(*a, **k)) or seen[-1])

    def loss(x):
        total = loss_of(model)(x)
        return total + seen[-1].float().square().sum()

    hot_step(loss, x, options=EXACT)
    assert took == [[]]
