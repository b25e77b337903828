"""Casts of weights that a backward keeps."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.storage.kept_casts import casts_to_keep
from hot_compile.passes.storage.step_time import SLACK, StepTime

RATE, SIZE = RATES["sm90"], 64
EACH = SIZE * SIZE * 6 / RATE.copy


def joint(count=4):
    """Layers' products and their gradients, of weights that autocast casts."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(f"primals_{n}") for n in range(count + 1))
    g = graph.placeholder("tangents_1")
    with FakeTensorMode():
        for node in (x, g):
            node.meta["val"] = torch.empty(8, SIZE, dtype=torch.bfloat16, device="cuda")
        for weight in weights:
            weight.meta["val"] = torch.empty(SIZE, SIZE, device="cuda")
    end = graph.output(())
    emit = Emitter(graph, end, x)
    cast = [emit.cast(weight, torch.bfloat16) for weight in weights]
    for weight in cast:
        x = emit(aten.mm.default, x, emit(aten.t.default, weight))
    for weight in reversed(cast[1:]):  # the first layer's input has no gradient
        g = emit(aten.mm.default, g, weight)
    end.args = ((x, g),)
    return graph, [node.name for node in cast]


def kept(slack, graph):
    return casts_to_keep(graph, StepTime(3 * slack / SLACK, 0.0, False), lambda _: RATE)


def test_as_many_are_kept_as_would_take_more_than_a_third_of_a_steps_slack():
    graph, (_, *again) = joint()
    assert kept(3.1 * EACH, graph) == ([], pytest.approx(3 * EACH))
    assert kept(1.5 * EACH, graph) == (again[:2], pytest.approx(EACH))
    assert kept(0.1 * EACH, graph) == (again, 0.0)


def test_where_nothing_is_known_of_times_none_is():
    graph, _ = joint()
    assert casts_to_keep(graph, None, lambda _: RATE) == ([], 0.0)
    assert casts_to_keep(graph, StepTime(0.0, 0.0, False), lambda _: None) == ([], 0.0)
