"""What storing, and making again, may take a step."""

import pytest
import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.storage.allowed import dearest, seconds_allowed
from hot_compile.passes.storage.prices import LAUNCH
from hot_compile.passes.storage.step_time import StepTime

RATE = RATES["sm90"]


def gelu(device):
    """``1 + erf(x)`` of 16-bit numbers, and casts of two weights."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in "xab")
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x.meta["val"] = torch.empty(64, 32, dtype=torch.bfloat16, device=device)
        for weight in weights:
            weight.meta["val"] = torch.empty(8, 8, device=device)
    end = graph.output(())
    emit = Emitter(graph, end, x)
    y = emit(aten.add.Tensor, emit(aten.erf.default, emit.cast(x, torch.float32)), 1)
    end.args = ((y, *(emit.cast(weight, torch.bfloat16) for weight in weights)),)
    return graph


def allowed(step, graphs, won=0.0, forms=0.0):
    return seconds_allowed(step, won, forms, graphs, lambda _: RATE)


def test_what_is_won_and_a_share_of_the_step():
    step = StepTime(1.0, 0.1, waits=False)
    assert allowed(step, ()) == step.slack
    assert allowed(step, (), won=2.0, forms=3.0) == pytest.approx(step.slack + 5.0)
    short = allowed(step, [gelu("cuda"), gelu("cuda")]) - step.slack
    assert short == pytest.approx(2 * 64 * 32 / RATE.coding)
    assert allowed(step, [gelu("cpu")]) == step.slack, "a CPU's functions keep their form"


def test_where_a_step_waits_for_its_host_launches_count():
    step = StepTime(0.1, 1.0, waits=True)
    assert allowed(step, (), won=2.0, forms=3.0) == 2.0
    assert allowed(step, [gelu("cuda")]) == pytest.approx(LAUNCH * RATE.launch)


def test_the_dearest_are_left_out_until_the_rest_fits():
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    seconds = {a: 1.0, b: 4.0, c: 2.0}
    assert dearest(seconds, 7.0) == ([], 7.0)
    assert dearest(seconds, 3.0) == ([b], 3.0)
    assert dearest(seconds, 0.5) == ([b, c, a], 0.0)
