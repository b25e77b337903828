"""What is compiled by "hot" already is looked at as it is compiled: nobody has to undo that."""

import pytest
import torch
from samples_models import MLP
from torch import nn
from torch.nn import functional as F

from hot_compile import calibrate, explain, memory_report

OWN = {"min_gain": 0, "keep_head": False}
X = torch.randn(48, 64)


def in_place(**keywords):
    model = MLP()
    model.compile(backend="hot", options=OWN, **keywords)
    return model


def wrapped():
    return torch.compile(MLP(), backend="hot", options=OWN)


def adapted():
    """By PEFT, then compiled in place."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["first", "last"])
    model = peft.get_peft_model(MLP(), config)
    model.compile(backend="hot", options=OWN)
    return model


def layers(explanation):
    return {d.site for d in explanation.plan.rewritten}


@pytest.mark.parametrize("compiled", [in_place, wrapped], ids=lambda f: f.__name__)
def test_explain_shows_the_layers_with_their_options(compiled, capsys):
    model = compiled()
    model(X).sum().backward()
    assert layers(explain(model, X)) == {"first", "last"}
    assert "2 of 2 products rewritten" in capsys.readouterr().out
    assert layers(explain(model, X, options={"exclude": ["first"]})) == {"last"}
    assert layers(explain(lambda: model(X).square().mean().backward())) == {"first", "last"}


def test_a_sequential_s_layers_are_called_as_it_calls_them():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    model.compile(backend="hot", options={**OWN, "exclude": ["0"]})
    assert layers(explain(model, X)) == {"2"}


def test_explain_shows_peft_s_layers():
    last = {d.site.removeprefix("base_model.model.last."): d for d in explain(adapted(), X).plan}
    assert last["base_layer"].strategy == "gx-only"
    assert "low-rank factor" in last["lora_A.default"].reason


def test_pieces_that_are_compiled_apart_are_graphs_of_their_own():
    model = nn.Sequential(in_place(), in_place())
    explanation = explain(model, X)
    assert [len(graph.plan.decisions) for graph in explanation.graphs] == [2, 2]


@pytest.mark.parametrize("place", [False, True])
def test_what_stock_compiles_is_explained_as_a_whole(place):
    model = MLP()
    if place:
        model.compile()
    else:
        model = torch.compile(model)
    assert layers(explain(model, X, options=OWN)) == {"first", "last"}
    assert not place or model._compiled_call_impl is not None


def test_memory_report_measures_stock_beside_it(capsys):
    x = torch.randn(4096, 64)
    report = memory_report(in_place(), x)
    assert capsys.readouterr().out == f"{report}\n"
    assert report.measured["hot"].held < report.measured["exact"].held
    assert {d.site for graph in report.graphs for d in graph.plan.rewritten} == {"first", "last"}


def test_it_is_calibrated_as_it_is():
    profile = calibrate(in_place(), [X], lambda model, x: F.mse_loss(model(x), x), progress=False)
    assert set(profile.layers) == {"first", "last"}
