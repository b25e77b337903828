"""Option ``schedule``: the switch of bit widths, its counter, and no second compilation."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hot_compile
from hot_compile.backend import hot
from hot_compile.config import HotConfig, Phase
from hot_compile.errors import OptionError
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.schedule import CLOCK, bits_at

SCHEDULE = [{"until_step": 3, "gx_bits": 8}, {"gx_bits": 4}]
ALWAYS = {"min_gain": 0, "keep_head": False}


@pytest.fixture(autouse=True)
def _first_step(fresh_dynamo):
    hot_compile.set_step(0)
    yield
    hot_compile.set_step(0)


def net():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def first_weight_gradient(step, model, x):
    model.zero_grad()
    step(x).square().mean().backward()
    return model[0].weight.grad.clone()


@pytest.mark.parametrize("lower", [False, True])
def test_switches_at_the_step_without_compiling_again(lower):
    model, x, reports = net(), torch.randn(64, 64), Reports()
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    want = {}
    for bits in (8, 4):
        torch._dynamo.reset()
        fixed = functools.partial(hot, options={**ALWAYS, "gx_bits": bits}, **keywords)
        want[bits] = first_weight_gradient(torch.compile(model, backend=fixed), model, x)
    assert not torch.equal(want[8], want[4])
    torch._dynamo.reset()
    options = {**ALWAYS, "schedule": SCHEDULE}
    scheduled = functools.partial(hot, options=options, recorder=reports, **keywords)
    step = torch.compile(model, backend=scheduled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    counters.clear()
    for number in range(6):
        got = first_weight_gradient(step, model, x)
        assert torch.equal(got, want[8 if number < 3 else 4]), number
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert len(reports.graphs) == 1  # the phase in force when it was compiled
    assert {d.gx_bits for g in reports.graphs for d in g.plan.rewritten} == {8}


def test_the_largest_of_several_optimizers_counts():
    CLOCK.count()
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    one, two = (torch.optim.SGD([p], lr=0.1) for p in parameters)
    for _ in range(3):
        one.step()
        two.step()
    assert hot_compile.state_dict() == {"version": 1, "step": 3}
    one.step()
    assert CLOCK.step == 4


def test_a_checkpoint_resumes_in_the_same_phase():
    hot_compile.set_step(7)
    state = copy.deepcopy(hot_compile.state_dict())
    hot_compile.set_step(0)
    hot_compile.load_state_dict(state)
    assert CLOCK.step == 7
    CLOCK.count()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
    assert CLOCK.step == 8


@pytest.mark.parametrize("state", [{}, {"version": 2, "step": 1}, {"version": 1}, 3])
def test_foreign_states_are_refused(state):
    with pytest.raises(OptionError):
        hot_compile.load_state_dict(state)


def test_skipped_steps_do_not_count():
    """A GradScaler that finds an overflow does not call the optimizer."""
    CLOCK.count()
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for value in (1.0, float("inf"), 1.0):
        scaler.scale(parameter.sum() * value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert CLOCK.step == 2


def test_phases():
    phases = HotConfig.from_options({"schedule": SCHEDULE}).schedule
    assert phases == (Phase(3, 8), Phase(None, 4))
    assert [bits_at(phases, step) for step in (0, 2, 3, 100)] == [8, 8, 4, 4]


@pytest.mark.parametrize(
    "value",
    [
        "8 then 4",
        [],
        [{"gx_bits": 5}],
        [{"gx_bits": 8.0}],
        [{"gx_bits": [8]}],
        [{"until_step": 3}],
        [{"gx_bits": 8}, {"gx_bits": 4}],
        [{"until_step": 3, "gx_bits": 8}],
        [{"until_step": 3, "gx_bits": 8}, {"until_step": 2, "gx_bits": 8}, {"gx_bits": 4}],
        [{"until_step": True, "gx_bits": 8}, {"gx_bits": 4}],
        [{"until": 3, "gx_bits": 8}, {"gx_bits": 4}],
    ],
)
def test_bad_schedules_are_refused(value):
    with pytest.raises(OptionError, match="until_step"):
        HotConfig.from_options({"schedule": value})


def test_the_counter_checks_its_step():
    for step in (-1, 1.5, True, "3"):
        with pytest.raises(OptionError, match="whole number"):
            hot_compile.set_step(step)
