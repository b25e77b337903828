"""Graphs that are not a module called on a batch: symbolic sizes anywhere, no parameters at all."""

from __future__ import annotations

import copy
import functools
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.config import Strategy
from hot_compile.inspect import run_uncompiled
from hot_compile.testing import cosine, hot_step

ALWAYS = {"min_gain": 0, "keep_head": False, "recipe": "int8"}

DYNAMIC = {
    "channels of a convolution": (
        nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()),
        (4, 4, 8, 8),
    ),
    "channels of a transposed convolution": (
        nn.Sequential(nn.PixelUnshuffle(2), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.GELU()),
        (4, 4, 8, 8),
    ),
    "channels of a grouped convolution": (
        nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 32, 3, groups=4), nn.GELU()),
        (4, 4, 8, 8),
    ),
    "length of a signal": (
        nn.Sequential(nn.Conv1d(8, 16, 3), nn.GELU(), nn.Conv1d(16, 8, 1)),
        (4, 8, 30),
    ),
    "rows and tokens": (
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        (20, 6, 32),
    ),
    "features of a layer": (
        nn.Sequential(nn.Flatten(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32)),
        (20, 6, 16),
    ),
}
QUICK = ("channels of a grouped convolution", "rows and tokens")
"""By every recipe in the quick run, the others by one: sizes are read before a strategy counts."""


IMAGES = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 1)
)
ROWS = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("model", "shape"), [(IMAGES, (3, 8, 8)), (ROWS, (64,))])
def test_a_batch_without_rows(model, shape, dynamic):
    torch._dynamo.reset()
    options = {**ALWAYS, "memory_min_bytes": 0}
    backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
    step = torch.compile(copy.deepcopy(model), backend=backend, dynamic=dynamic)
    for rows in (0, 5, 0):
        step(torch.randn(rows, *shape)).square().sum().backward()
    exact = copy.deepcopy(model)
    exact(torch.zeros(0, *shape)).square().sum().backward()
    assert [p.grad.shape for p in step.parameters()] == [p.grad.shape for p in exact.parameters()]
    assert all(p.grad.isfinite().all() for p in step.parameters())


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(n, r, marks=() if r == "int8" or n in QUICK else pytest.mark.slow)
        for n in DYNAMIC
        for r in ("int8", "fast", "paper")
    ],
)
def test_symbolic_sizes(name, recipe, caplog):
    """The graph is read whole, every layer accounted for, and the gradients are right."""
    torch.manual_seed(0)
    model, shape = DYNAMIC[name]
    exact, x = copy.deepcopy(model), torch.randn(shape)
    exact(x).square().mean().backward()
    model = copy.deepcopy(model)
    options = {**ALWAYS, "recipe": recipe, "lqs": "off"}
    with caplog.at_level(logging.WARNING, "hot_compile"):
        _, graphs = hot_step(lambda x: model(x).square().mean(), x, options=options, dynamic=True)
    assert not caplog.records
    layers = sum(isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d)) for m in model)
    assert len(graphs[0].plan.decisions) >= layers
    assert graphs[0].to_json()
    least = 0.97 if recipe == "int8" else 0.6  # HLA drops half of what random rows hold
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert cosine(ours.grad, theirs.grad) > least


def embeddings(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def clip_loss(a, b):
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    return F.cross_entropy(logits, torch.arange(len(a)))


PRODUCTS = {
    "a product with a transpose": (lambda a, b: (a @ b.T).square().sum(), (48, 64), (32, 64)),
    "a product": (lambda a, b: (a @ b).square().sum(), (48, 64), (64, 32)),
    "a linear of two activations": (lambda a, b: F.linear(a, b).sin().sum(), (48, 64), (32, 64)),
    "a contrastive loss": (clip_loss, (64, 96), (64, 96)),
    "a Gram matrix": (lambda a: (a.T @ a).square().sum(), (64, 48)),
    "a convolution of two activations": (
        lambda a, b: F.conv2d(a, b, padding=1).square().sum(),
        (4, 8, 8, 8),
        (16, 8, 3, 3),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_graph_without_parameters_has_no_layers(name):
    """No input is a parameter, which is known: a product of two activations is no layer."""
    torch.manual_seed(0)
    function, *shapes = PRODUCTS[name]
    given = embeddings(*shapes)
    want = torch.autograd.grad(function(*given), given)
    _, graphs = hot_step(function, *given, options={**ALWAYS, "memory": "off"})
    decisions = [d for graph in graphs for d in graph.plan]
    assert decisions
    assert all(d.strategy is Strategy.EXACT and d.reason for d in decisions)
    for got, exact in zip(given, want, strict=True):
        torch.testing.assert_close(got.grad, exact, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_no_module_owns_is_a_layer():
    """Functional code: nn.Parameter objects passed in are weights all the same."""
    weights = {"a": nn.Parameter(torch.randn(64, 64)), "b": nn.Parameter(torch.randn(32, 64))}

    def loss(x, a, rest):
        return F.linear(F.linear(x, a).sin(), rest["b"]).square().sum()

    _, graphs = hot_step(loss, torch.randn(48, 64), weights["a"], weights, options=ALWAYS)
    assert [d.strategy for d in graphs[0].plan] == [Strategy.INT8] * 2


def small_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    options = {"min_gain": 0, "accept": "auto", "strict": True}
    how = functools.partial(hot, options=options, inner_compile=run_uncompiled)
    return model, torch.compile(model, backend=how), torch.randn(512, 64)


def test_a_step_that_ran_can_be_copied_and_saved():
    """As for an average of weights; what was seen of it stays with the first."""
    model, step, x = small_step()
    step(x).square().mean().backward()
    other, file = copy.deepcopy(step), io.BytesIO()
    torch.save(step, file)
    file.seek(0)
    for again in (other, torch.load(file, weights_only=False)):
        again.zero_grad()
        again(x).square().mean().backward()
        for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert cosine(mine.grad, theirs.grad) > 0.99


def test_a_step_compiled_with_its_backward_and_its_optimizer():
    """Dynamo breaks the graph at the backward, and sees no code of ours in it."""
    model, _, x = small_step()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    @torch.compile(backend="hot", options={"min_gain": 0, "strict": True})
    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [float(step()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
