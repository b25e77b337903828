"""Sums of a few rows written out: the same sums, whatever the rows are made of."""

import pytest
import torch
from samples_experts import gradients, loss_of, routed
from samples_graphs import forms_pay
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import few_rows, permutations
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact
NAME = "sum of a few rows written out"


@pytest.fixture
def took(monkeypatch):
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    return forms_pay(monkeypatch, few_rows, permutations)


@pytest.mark.parametrize(
    ("top", "facts", "written"),
    [
        (8, {}, True),
        (8, {"wide": True}, True),
        (9, {"masked": True}, True),
        (2, {}, False),  # Inductor writes these out
        (17, {}, False),  # long
    ],
)
def test_what_experts_made_is_added_up(took, top, facts, written):
    model, x = routed(experts=max(8, top), top=top, **facts)
    want = gradients(model.float(), x.float())
    model.to(torch.bfloat16).zero_grad()
    hot_step(loss_of(model), x, options=OPTIONS)
    assert (NAME in took[0]) is written
    for name, p in model.named_parameters():
        off = (p.grad.float() - want[name]).norm() / want[name].norm()
        assert off < 0.03, (name, off)  # what bfloat16 leaves


class Shared(nn.Module):
    """Keys that several queries share, as in attention with fewer keys."""

    def __init__(self, count, keep, dim=2, dtype=torch.float32):
        super().__init__()
        self.key = nn.Parameter(torch.randn(2, 3, 1, 5, 16).to(dtype))
        self.count, self.keep, self.dim = count, keep, dim

    def forward(self, x):
        shared = torch.matmul(x, self.key.expand(2, 3, self.count, 5, 16).transpose(-1, -2))
        return shared.float().sin().sum()


@pytest.mark.parametrize(("count", "dtype"), [(8, torch.float32), (12, torch.bfloat16)])
def test_gradients_of_shared_keys_are_added_up(took, count, dtype):
    torch.manual_seed(0)
    model = Shared(count, keep=True, dtype=dtype)
    x = torch.randn(2, 3, count, 7, 16).to(dtype)
    model(x).backward()
    want, model.key.grad = model.key.grad, None
    hot_step(model, x, options=OPTIONS)
    assert NAME in took[0]
    torch.testing.assert_close(model.key.grad, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("total", "applies"),
    [
        (lambda x: x.view(4, 8, 32).sum(1), True),
        (lambda x: x.view(4, 8, 32).sum(1, keepdim=True), True),
        (lambda x: x.view(4, 8, 32).sum(1, dtype=torch.float64), False),
        (lambda x: x.view(4, 8, 32).sum(1, dtype=torch.float32), True),
        (lambda x: x.view(4, 32, 8).sum(2), False),  # neighbours in memory
        (lambda x: x.view(2, 2, 8, 32).sum((0, 2)), False),
        (lambda x: x.view(4, 8, 32).sin().sum(1), False),  # worked out where it is added anyway
        (lambda x: x.view(32, 32)[torch.randperm(32)].view(4, 8, 32).sum(1), True),
        (lambda x: x.long().view(4, 8, 32).sum(1), False),
    ],
)
def test_where_it_applies(monkeypatch, total, applies):
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    traced = make_fx(total)(torch.randn(1024))
    (node,) = traced.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert few_rows.applies(node) is applies


def test_what_a_sum_is_asked_for_it_gives():
    """CUDA's autocast asks for fp32 of bfloat16 rows."""
    trace = make_fx(lambda x: x.view(4, 8, 32).sum(1, dtype=torch.float32), tracing_mode="fake")
    x = torch.randn(1024).to(torch.bfloat16)
    traced = trace(x)
    (node,) = traced.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert few_rows.replace(traced.graph, node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert not traced.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    truth = x.double().view(4, 8, 32).sum(1)
    torch.testing.assert_close(traced(x).double(), truth, rtol=1e-6, atol=1e-6)
    assert traced(x).dtype is torch.float32


def test_what_is_checkpointed_is_made_again():
    """Written out, too."""
    trace = make_fx(lambda x: x.view(4, 8, 32).sum(1).sin(), tracing_mode="fake")
    graph = trace(torch.randn(1024)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    known, policy = set(graph.nodes), CheckpointPolicy.MUST_RECOMPUTE
    node.meta |= {"recompute": policy, "ac_graph_id": 3}
    assert few_rows.replace(graph, node)
    made = set(graph.nodes) - known
    assert len(made) > 8
    assert {(n.meta["recompute"], n.meta["ac_graph_id"]) for n in made} == {(policy, 3)}
