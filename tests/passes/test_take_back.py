"""What was saved so that it may be stored, and then was not, is made again in the backward."""

import pytest
import torch
from samples_graphs import given
from torch import fx, nn
from torch.nn import functional as F

from hot_compile.passes import pipeline
from hot_compile.passes.base.graph import aten, placeholders, returned
from hot_compile.passes.storage.take_back import take_back
from hot_compile.testing import cosine, hot_step

WIDTH, INNER, ROWS = 64, 96, 128


class Gated(nn.Module):
    """A layer whose input is a gate's result, and the gate's half reads what made it."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, value = self.into(x).chunk(2, -1)
        return self.out(F.silu(gate) * value)


def crossing(monkeypatch, stored):
    """Shapes that cross by (whether stored exactly), and the gradients, where nothing may be stored
    or all may."""
    with monkeypatch.context() as patched:
        if not stored:
            patched.setattr(pipeline, "worth_it", lambda chosen, price, most: {})
            patched.setattr(pipeline, "step_time", lambda *_: _Step())
            patched.setattr(pipeline, "seconds_allowed", lambda *_: 1.0)
        torch.manual_seed(0)
        model, x = nn.Sequential(Gated(), Gated()), torch.randn(ROWS, WIDTH)
        options = {"min_gain": 0, "memory_min_bytes": 1024}
        options |= {"memory": "all"} if stored else {"memory": "auto"}
        _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options=options)
    shapes = [tuple(map(int, c.shape)) for c in graph.crossing if c.module]
    return shapes, {name: p.grad for name, p in model.named_parameters()}, model, x


def test_so_it_is_within_a_budget_of_bytes():
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()), torch.randn(ROWS, WIDTH)
    options = {"min_gain": 0, "memory_min_bytes": 1024, "memory_budget": 1.0}
    _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options=options)
    shapes = [tuple(map(int, c.shape)) for c in graph.crossing if c.module]
    assert (ROWS, INNER) not in shapes
    assert (ROWS, 2 * INNER) in shapes


class _Step:
    """A step that may take long."""

    slack, seconds, waits_for_host = 1.0, 1.0, False


@pytest.mark.parametrize("stored", [True, False])
def test_of_a_gate_one_tensor_is_kept(monkeypatch, stored):
    """What it reads, stored or not: its halves are factors, and tolerate rounding."""
    shapes, got, model, x = crossing(monkeypatch, stored)
    assert (ROWS, INNER) not in shapes
    assert (ROWS, 2 * INNER) in shapes
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        assert cosine(got[name], p.grad) > 0.99, name


def graphs(op):
    """A forward that keeps x's cosine and what ``op`` makes of it; a backward that reads both."""
    forward, backward = fx.Graph(), fx.Graph()
    (x,) = given(forward, {"x": ((8, 4), torch.float32)})
    like = x.meta["val"]

    def call(graph, target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = like
        return node

    kept = call(forward, aten.cos.default, x)
    made = call(forward, op, kept) if op is not aten.mm.default else call(forward, op, kept, kept)
    kept.name, made.name = "kept", "made"
    forward.output((x, kept, made))
    arriving = given(
        backward, dict.fromkeys(("kept", "made", "tangents_1"), ((8, 4), torch.float32))
    )
    total = call(backward, aten.mul.Tensor, arriving[1], arriving[2])
    backward.output((call(backward, aten.mul.Tensor, total, arriving[0]),))
    return forward, backward, kept, made


@pytest.mark.parametrize(
    ("op", "stored", "taken"),
    [
        (aten.sin.default, False, True),
        (aten.sin.default, True, False),  # what it is made of is not kept as it is
        (aten.mm.default, False, False),  # no pass over it
    ],
)
def test_what_is_taken_back(op, stored, taken):
    forward, backward, kept, made = graphs(op)
    found = take_back(forward, backward, 1, {"made"}, {kept} if stored else set(), set())
    assert found == ({made} if taken else set())
    names = [node.name for node in placeholders(backward)]
    assert ("made" in names) is not taken
    assert len(returned(forward)) == (2 if taken else 3)
    assert (len(backward.find_nodes(op="call_function", target=op)) == 1) is taken


class Normed(nn.Module):
    """Group norms in 16 bits whose input a convolution reads, too."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, 32) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.beside = nn.Conv2d(32, 32, 1)

    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = self.beside(x) + conv(F.silu(norm(x)))
        return x


def test_what_a_norm_reads_is_kept_again_where_its_result_is_not_stored(monkeypatch):
    """As it was before, and no gradient changes."""
    monkeypatch.setattr(pipeline, "step_time", lambda *_: _Step())
    monkeypatch.setattr(pipeline, "seconds_allowed", lambda *_: 1.0)
    torch.manual_seed(0)
    model, x = Normed().to(torch.bfloat16), torch.randn(4, 32, 16, 16, dtype=torch.bfloat16)
    options = {"min_gain": 99, "memory_min_bytes": 1024}

    def loss(x):
        return model(x).float().square().mean()

    def gradients(most):
        def worth(chosen, price, seconds):
            return dict([*chosen.items()][:most])

        monkeypatch.setattr(pipeline, "worth_it", worth)
        model.zero_grad()
        _, (graph,) = hot_step(loss, x, options=options)
        return graph.crossing, [p.grad.clone() for p in model.parameters()]

    none, exact = gradients(0)
    assert {c.dtype for c in none if c.bytes >= x.numel()} == {"bfloat16"}
    assert all(c.scheme == "exact" for c in none)
    sizes = {c.name: c.bytes for c in none}
    held = [sum(sizes.values())]
    for most in (1, 2, 99):
        found, got = gradients(most)
        kept = {c.name: c.bytes for c in found if c.scheme == "exact"}
        assert kept.items() <= sizes.items()
        assert len(found) - len(kept) == min(most, 2)  # the first block reads an input
        held.append(sum(c.bytes for c in found))
        for a, b in zip(got, exact, strict=True):
            assert cosine(a.float(), b.float()) > 0.998
    assert held == sorted(held, reverse=True)
    assert held[-1] < 0.7 * held[0]  # two of three in half
    model.float().zero_grad()
    loss(x.float()).backward()
    for p, b in zip(model.parameters(), exact, strict=True):
        assert cosine(p.grad, b.float()) > 0.999
