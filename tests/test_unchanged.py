"""``explain`` and ``memory_report`` of training steps: keyword arguments, closures, losses."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hot_compile import explain, memory_report
from hot_compile.unchanged import reached

ALWAYS = {"min_gain": 0, "keep_head": False}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 64))
        self.layers = nn.Sequential(*layers)

    def forward(self, x, labels=None, options=None):
        x = F.layer_norm(x, (64,))  # on raw data, what a batch norm follows stays exact
        out = self.layers(x) * (1 if options is None else options)
        loss = None if labels is None else F.mse_loss(out, labels)
        return {"loss": loss, "out": out}


class Loop:
    """A trainer, as people write them."""

    def __init__(self, model, optimizer):
        self.parts = {"model": model, "optimizer": optimizer}

    def step(self, x, labels):
        model, optimizer = self.parts["model"], self.parts["optimizer"]
        loss = model(x, labels=labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


MODEL = Net()
X = torch.randn(48, 64)


def uses_globals():
    def inner():
        return MODEL(X, labels=X)["loss"]

    return inner()


def everything(model, *optimizers):
    states = (copy.deepcopy(o.state_dict()) for o in optimizers)
    return [copy.deepcopy(model.state_dict()), *states]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def rewritten(explanation):
    return {d.site.split(".")[-1] for d in explanation.plan.rewritten}


def test_keyword_arguments_reach_the_model(capsys):
    assert rewritten(explain(Net(), X, labels=X, options=ALWAYS)) == {"0", "3"}
    assert rewritten(explain(Net(), x=X, labels=X, options=ALWAYS)) == {"0", "3"}


@pytest.mark.parametrize("name", ["closure", "argument", "globals", "partial", "lambda"])
def test_a_function_that_computes_the_loss(name):
    model = MODEL if name == "globals" else Net()

    def loss_of(model):
        return model(X, labels=X, options=2.0)["loss"]

    functions = {
        "closure": lambda: loss_of(model),
        "argument": lambda model: loss_of(model),
        "globals": uses_globals,
        "partial": functools.partial(loss_of, model),
        "lambda": lambda: model(X, options=3.0)["out"].sum(),
    }
    before = everything(model)
    arguments = (model,) if name == "argument" else ()
    assert rewritten(explain(functions[name], *arguments, options=ALWAYS)) == {"0", "3"}
    assert_same(everything(model), before)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_whole_step_changes_nothing(kind, steps_before):
    model = Net()
    loop = Loop(model, kind(model.parameters(), lr=0.1))
    for _ in range(steps_before):
        loop.step(X, X)
    model.layers[0].weight.grad = gradient = torch.ones(96, 64)
    before = everything(model, loop.parts["optimizer"])
    random = torch.get_rng_state()
    assert rewritten(explain(loop.step, X, labels=X, options=ALWAYS)) == {"0", "3"}
    assert_same(everything(model, loop.parts["optimizer"]), before)
    assert model.layers[0].weight.grad is gradient
    assert (gradient == 1).all()
    assert model.layers[3].weight.grad is None
    assert torch.equal(random, torch.get_rng_state())


def test_a_model_that_cannot_be_found_keeps_its_gradients():
    hidden = {str(i): None for i in range(2000)} | {"model": nn.Linear(64, 64)}
    hidden["model"].weight.grad = gradient = torch.ones(64, 64)

    def step():
        hidden["model"](X).sum().backward()

    assert not reached(step).modules
    explain(step, options=ALWAYS)
    assert hidden["model"].weight.grad is gradient
    assert (gradient == 1).all()


@pytest.mark.parametrize("function", [explain, memory_report])
def test_mistakes_are_named(function):
    with pytest.raises(TypeError, match="got a Tensor"):
        function(X)
    with pytest.raises(TypeError, match=r"got options of type float.*lambda"):
        function(Net(), X, options=2.0)


@pytest.mark.parametrize("detach", [False, True])
def test_memory_is_not_measured_of_a_step_with_its_backward(detach):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model)

    def step():
        loss = model(X).square().mean()
        loss.backward()
        if detach:
            return loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(TypeError, match="up to the loss"):
        memory_report(step)
    assert_same(everything(model), before)


@pytest.mark.slow
def test_memory_of_a_loss_is_the_same_however_it_is_passed():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(512, 64)
    options = {**ALWAYS, "memory_min_bytes": 0}
    by_keyword = memory_report(model, x, labels=x, options=options)
    closure = memory_report(lambda: model(x, labels=x)["loss"], options=options)
    own = memory_report(model, x, loss_fn=lambda out: F.mse_loss(out["out"], x), options=options)
    held = [report.measured["hot"].held for report in (by_keyword, closure)]
    assert held[0] == held[1]
    assert own.measured["hot"].held >= held[0]
    assert by_keyword.measured["exact"].held > held[0]
