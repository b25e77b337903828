"""Looks that fail, that are miscompiled, under whatever is the user's default."""

import contextlib
import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from samples_cancelling import mlp
from samples_looks import ALWAYS, bad_net, compiled, errors, gradients, run_step, train_critic
from torch import nn

import hot_compile
from hot_compile.again import Again
from hot_compile.backend import _Graph, hot
from hot_compile.inspect import run_uncompiled
from hot_compile.observing import acceptance, eager, evidence, gauge
from hot_compile.observing.eager import Eager
from hot_compile.observing.watching import Doubled, Twin

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where findings are kept; nothing of other tests lies there."""
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")


def test_a_look_that_fails_costs_one_warning_and_no_step(monkeypatch, caplog):
    monkeypatch.setattr(Eager, "gradients", lambda *_: 1 / 0)
    monkeypatch.setattr(Twin, "code", lambda *_: 1 / 0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(64, 64)
    step = compiled(model)
    for _ in range(3):
        model.zero_grad()
        step(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    told = [r for r in caplog.records if "not observed" in r.getMessage()]
    assert len(told) == 1
    assert "ZeroDivisionError" in str(hot_compile.certificate(step).unseen)


def test_what_does_not_run_operator_by_operator_is_compared_with_compiled_code(monkeypatch, caplog):
    monkeypatch.setattr(Eager, "gradients", lambda *_: 1 / 0)
    torch.manual_seed(0)
    model, x = bad_net()
    want = train_critic(model, model, x, 1)
    assert max(errors(train_critic(compiled(model), model, x), want).values()) < 0.25
    assert "not observed" not in caplog.text


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.factor * grad_output, None


def miscompiled(monkeypatch, factor):
    """Gradients by any graph of ours are so many times too large."""
    own = _Graph.compile

    def wrong(self, config, profile=None, observation=None):
        run = own(self, config, profile, observation)
        if observation is not None or self.inner_compile is not run_uncompiled or not self.done:
            return run
        return lambda *args: [Times.apply(y, factor) if y.requires_grad else y for y in run(*args)]

    monkeypatch.setattr(_Graph, "compile", wrong)


def test_what_stays_wrong_is_compiled_as_stock_compiles_it(monkeypatch, caplog):
    """However exact a graph of ours is: what of it is wrong nobody knows."""
    miscompiled(monkeypatch, 3.0)
    torch.manual_seed(0)
    model, x = mlp(64, 8), torch.randn(256, 64)

    def train(f, steps):
        for _ in range(steps):
            model.zero_grad()
            f(x).square().mean().backward()
        return gradients(model)

    want = train(model, 1)
    step = compiled(model)
    assert max(errors(train(step, 1), want).values()) > 1.9
    assert max(errors(train(step, 16), want).values()) < 1e-5
    assert caplog.text.count("as stock Inductor compiles it") == 1
    assert not hot_compile.certificate(step).off
    assert hot_compile.certificate(step).compiles == 4, "a repair, and two of all of the graph"
    torch._dynamo.reset()
    assert max(errors(train(compiled(model), 1), want).values()) < 1e-5, "the next run knows"


def trained(compile_model=None):
    """The last loss of some steps with an optimizer."""
    torch.manual_seed(0)
    model, x = mlp(64, 8), torch.randn(256, 64)
    f = compile_model(model) if compile_model else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = f(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_exact_gradients_take_the_place_of_what_is_not_finite(monkeypatch, caplog):
    miscompiled(monkeypatch, math.nan)
    assert trained(compiled) == pytest.approx(trained(), rel=1e-5)
    assert caplog.text.count("these take their place") == 3, "two looks, and the step that judges"
    assert caplog.text.count("as stock Inductor compiles it") == 1


def test_parameters_that_are_lost_are_told_of_and_the_next_run_is_right(monkeypatch, caplog):
    """A step of NaN is the last with an optimizer: there is nothing exact to compare with."""
    miscompiled(monkeypatch, math.inf)

    def short(*_):
        raise eager.TooLarge("no")

    monkeypatch.setattr(Eager, "whole", short)
    assert math.isnan(trained(compiled))
    assert caplog.text.count("Start again") == 1
    torch._dynamo.reset()
    assert trained(compiled) == pytest.approx(trained(), rel=1e-5)
    assert caplog.text.count("Start again") == 1


def test_a_step_inside_the_graph():
    """MAML: an inner step's gradients are part of the forward (``torch.func``)."""
    torch.manual_seed(0)
    model, x = mlp(16, 1), torch.randn(512, 16)
    y = x.sum(1, keepdim=True).sin()
    parameters = dict(model.named_parameters())

    def loss(which):
        def inner(given):
            return F.mse_loss(torch.func.functional_call(model, given, (x[:256],)), y[:256])

        slopes = torch.func.grad(inner)(parameters)
        adapted = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
        return F.mse_loss(torch.func.functional_call(model, adapted, (x[which],)), y[which])

    loss(slice(256, None)).backward()
    want = gradients(model)
    step = compiled(loss)
    for _ in range(5):
        model.zero_grad()
        step(slice(256, None)).backward()
    found = hot_compile.certificate(step)
    assert not found.unseen
    assert len(found.looks) == 3
    assert max(errors(gradients(model), want).values()) < 0.25


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), eager.TooLarge("no")])
def test_where_memory_is_short_the_next_look_tries_again(monkeypatch, caplog, error):
    own, tries = Eager.gradients, []

    def short(self, *given):
        tries.append(1)
        if len(tries) < 3:
            raise error
        return own(self, *given)

    monkeypatch.setattr(Eager, "gradients", short)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(64, 64)
    step = compiled(model)
    for number in range(5):
        model.zero_grad()
        step(x).square().mean().backward()
        if number == 2:
            assert "memory" in str(hot_compile.certificate(step).unseen)
    assert len(hot_compile.certificate(step).looks) == 1
    assert len([r for r in caplog.records if "memory" in r.getMessage()]) == 1


class Shifted(nn.Module):
    """What bf16 loses to a sum with 256, code that works it out in fp32 does not lose."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second((self.first(x) + 256) - 256)


def test_what_rounds_between_operators_is_compared_with_compiled_exact_code(caplog):
    torch.manual_seed(0)
    model, x = Shifted().bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16)
    exact = model.second((model.first(x).float() + 256 - 256).bfloat16())
    assert (model(x) - exact).norm() > 0.1 * exact.norm()
    step = compiled(model, lower=True)
    for _ in range(5):
        run_step(step, lambda f, x: f(x).float().square().mean(), model, x)
    found = hot_compile.certificate(step)
    assert len(found.looks) == 3
    assert not found.unseen
    assert found.errors.worst < 0.2
    assert "not observed" not in caplog.text


def test_a_miscompiled_twin_is_not_believed(monkeypatch, caplog):
    """Inductor's code of a twin may be wrong where that of the step is right: other kernels."""
    own, made = Twin._compiled, []

    def wrong(self, args):
        made.append(own(self, args))
        if len(made) > 1:
            return made[-1]
        return dataclasses.replace(made[0], run=lambda *xs: [y * 2 for y in made[0].run(*xs)])

    monkeypatch.setattr(Twin, "_compiled", wrong)
    torch.manual_seed(0)
    model, x = bad_net()
    want = train_critic(model, model, x, 1)
    step = compiled(model)
    assert max(errors(train_critic(step, model, x), want).values()) < 0.25
    assert len(made) > 1
    assert "not observed" not in caplog.text


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "state",
    [
        functools.partial(torch.device, "meta"),
        functools.partial(default_dtype, torch.float64),
        pytest.param(functools.partial(default_dtype, torch.bfloat16), marks=pytest.mark.slow),
        torch.autograd.detect_anomaly,
    ],
    ids=["device", "float64", "bfloat16", "anomaly"],
)
def test_what_a_user_makes_the_default_is_nothing_to_a_look(state, caplog):
    torch.manual_seed(0)
    model, x = bad_net()
    want = train_critic(model, model, x, 1)
    step = compiled(model)
    with state():
        got = train_critic(step, model, x)
    assert max(errors(got, want).values()) < 0.25
    assert "not observed" not in caplog.text


class Rounding(nn.Module):
    """Deep and steep enough for bf16 to tell: products of 8 bits, normalised, over and over."""

    def __init__(self, bf16):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.SiLU()) for _ in range(6)]
        self.layers, self.bf16 = nn.Sequential(*blocks, nn.Linear(64, 8)), bf16

    def body(self, x):
        return self.layers(x)

    def forward(self, x):
        if self.bf16 != "inside":
            return self.body(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


BF16 = "around", "inside", "given"
"""By an autocast around the graph, by one inside it, by its weights and its input."""


def looked_at_rounding(bf16, steps=3, inner_compile=run_uncompiled, model=Rounding):
    dtype = torch.bfloat16 if bf16 == "given" else torch.float32
    model = model(bf16).to(dtype)
    backend = functools.partial(hot, options=ALWAYS, inner_compile=inner_compile)
    step, x = torch.compile(model, backend=backend), torch.randn(256, 64, dtype=dtype)
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 == "around"):
            y = step(x)
        F.cross_entropy(y.float(), torch.arange(256) % 8).backward()
    return hot_compile.certificate(step)


@pytest.fixture
def rounded(monkeypatch):
    """Outputs operator by operator are as far from compiled ones as bf16 makes those of an
    EfficientNet."""
    own = Eager.gradients

    def gradients(self, step, tangents):
        off, found = own(self, step, tangents)
        return off + 2 * gauge.SAME * (not step.full), found

    monkeypatch.setattr(Eager, "gradients", gradients)


@pytest.mark.parametrize("bf16", BF16)
def test_what_bf16_rounds_is_told_without_compiling_anything(bf16, rounded, monkeypatch):
    """Outputs that two ways to round differ in are those of the step all the same."""
    monkeypatch.setattr(Doubled, "_surely", lambda *_: pytest.fail("a twin is compiled"))
    found = looked_at_rounding(bf16)
    assert not found.unseen
    assert len(found.looks) == 2
    assert found.errors.worst < 0.2


class Casting(Rounding):
    """Attention whose queries and keys are turned in fp32, and cast to what its values are in."""

    def __init__(self, bf16):
        super().__init__(bf16)
        self.before = nn.Linear(64, 64)

    def body(self, x):
        v = self.before(x)
        turned = (v.float() * torch.linspace(0.5, 2, 64)).to(v.dtype)
        heads = [t.view(1, 16, 16, 64) for t in (turned, turned, v)]
        return self.layers(F.scaled_dot_product_attention(*heads).view(-1, 64))


@pytest.mark.parametrize("bf16", BF16)
def test_what_is_cast_to_autocasts_dtype_is_computed_without_it_too(bf16, rounded, monkeypatch):
    monkeypatch.setattr(Doubled, "_surely", lambda *_: pytest.fail("a twin is compiled"))
    found = looked_at_rounding(bf16, model=Casting)
    assert not found.unseen
    assert len(found.looks) == 2
    assert found.errors.worst < 0.2


def test_a_graph_that_needs_autocast_gets_a_compiled_twin(rounded, monkeypatch):
    def fails(_):
        raise RuntimeError("expected mat1 and mat2 to have the same dtype")

    asked, own = [], Doubled._surely
    monkeypatch.setattr(Again, "in_full", fails)
    monkeypatch.setattr(Doubled, "_surely", lambda *given: asked.append(1) or own(*given))
    found = looked_at_rounding("around")
    assert asked
    assert not found.unseen
    assert found.errors.worst < 0.2


def test_an_output_that_is_not_the_steps_is_told_from_rounding(monkeypatch):
    """What is off by more than autocast is, is compared with compiled code, and said."""
    own, asked = Eager.gradients, []

    def other(self, step, tangents):
        off, found = own(self, step, tangents)
        self.samples = {place: 2 * values for place, values in self.samples.items()}
        return off + 1, found

    monkeypatch.setattr(Eager, "gradients", other)
    surely = Doubled._surely
    monkeypatch.setattr(Doubled, "_surely", lambda *given: asked.append(1) or surely(*given))
    found = looked_at_rounding("around")
    assert asked
    assert found.errors.worst < 0.2


def test_a_doubt_that_is_rounding_shows_no_layers(monkeypatch):
    """A first look over budget is followed by one that knows what autocast rounds, and by none
    that is compiled, or shows layers."""
    asked = []
    monkeypatch.setattr(acceptance, "BUDGET", 0.02)
    monkeypatch.setattr(evidence, "_OF_ROUNDING", 4.0)
    monkeypatch.setattr(Doubled, "_surely", lambda *given: asked.append(given))
    found = looked_at_rounding("around", steps=4)
    assert [bool(look.off) for look in found.looks] == [True, False, False]
    assert not asked


@pytest.mark.parametrize("bf16", BF16)
def test_layers_are_shown_by_code_that_nothing_is_compiled_for(bf16, monkeypatch):
    """Where what autocast rounds does not excuse an error, around the graph or inside it."""
    graphs, asked, own = {}, [], _Graph._twin

    def twin_of(self, *given):
        made = own(self, *given)
        graphs[made] = self
        return made

    monkeypatch.setattr(acceptance, "BUDGET", 1e-3)
    monkeypatch.setattr(_Graph, "_twin", twin_of)
    monkeypatch.setattr(Doubled, "_surely", lambda *given: asked.append(given[-1][0]))
    looked_at_rounding(bf16, steps=4, inner_compile=lambda *a, **k: run_uncompiled(*a, **k))
    assert asked
    assert all(graphs[twin].inner_compile is run_uncompiled for twin in asked)


def test_a_repair_is_in_vain_if_the_worst_error_is_what_it_was():
    seen = gauge.Gauge(trained=["a.weight", "b"], weights=["a.weight"])
    exact = torch.linspace(-1, 1, 4001)

    def looked(**errors):
        for name, error in errors.items():
            seen.gradient(name.replace("_", "."), exact * (1 + error), exact)
        seen.read()
        return seen.repaired_in_vain

    assert not looked(a_weight=0.3, b=0.1)
    seen.before = seen.errors
    assert looked(a_weight=0.301, b=0.4), "another one may be worse by now"
    assert not looked(a_weight=0.2, b=0.3)
