"""Steps run in order, are counted, and stop where one that is needed finds nothing."""

import logging

import pytest
from torch import fx

from hot_compile.passes.base.steps import Step, run


def steps(*counts, needed=()):
    """Steps that write their name down and find so many things."""

    def step(name, count):
        return Step(name, lambda state: state.append(name) or count, needed=name in needed)

    return tuple(step(str(place), count) for place, count in enumerate(counts))


@pytest.mark.parametrize(
    ("counts", "needed", "ran", "whole"),
    [
        ((1, 0, 2), (), ["0", "1", "2"], True),
        ((1, 0, 2), ("1",), ["0", "1"], False),
        ((1, 1, 2), ("1",), ["0", "1", "2"], True),
    ],
)
def test_in_order(counts, needed, ran, whole, caplog):
    state = []
    with caplog.at_level(logging.INFO, "hot_compile"):
        assert run("some", steps(*counts, needed=needed), state, {"joint": fx.Graph()}) is whole
    assert state == ran
    assert "hot: some: 0 1" in caplog.text


def test_what_a_step_raises_is_not_caught():
    def fails(state):
        raise KeyError("a reason")

    with pytest.raises(KeyError, match="a reason"):
        run("some", (Step("fails", fails),), None, {})
