"""Looks begin where training steps do."""

import pytest
import torch
from torch import nn

from hot_compile.inspect import run_uncompiled
from hot_compile.observing.steps import Steps

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Told:
    """A compiled layer whose forwards are told to ``Steps``, and which of them begin a step."""

    def __init__(self):
        self.layer, self.steps, self.begun = nn.Linear(4, 4), Steps(), []
        self._run = torch.compile(self.layer, backend=self._backend)

    def _backend(self, gm, examples):
        from torch._inductor.compile_fx import compile_fx

        run = compile_fx(gm, examples, inner_compile=run_uncompiled)

        def told(*args):
            self.begun.append(self.steps.begins(args))
            outputs = run(*args)
            self.steps.passed(outputs, args)
            return outputs

        return told

    def __call__(self):
        return self._run(torch.ones(2, 4)).sum()


@pytest.mark.parametrize("calls", [1, 3])
def test_forwards_before_one_backward(calls):
    told = Told()
    for _ in range(3):
        told.layer.zero_grad()
        sum(told() for _ in range(calls)).backward()
    assert told.begun == 3 * [True, *[False] * (calls - 1)]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_accumulated(to_none):
    told = Told()
    optimizer = torch.optim.SGD(told.layer.parameters(), 0.1)
    for _ in range(3):
        for _ in range(2):
            told().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert told.begun == 3 * [True, False]


def test_a_forward_without_a_backward():
    told = Told()
    for _ in range(2):
        told.layer.zero_grad()
        loss = told()
        told().detach()  # a target, dropped
        loss.backward()
        with torch.no_grad():
            told()
    assert told.begun[:2] == [True, False]
    assert told.begun[3]


def test_gradients_that_were_there_before_the_first_forward():
    """They may be of a step under way: a step begins once an optimizer has used them."""
    told = Told()
    told().backward()
    told.steps, told.begun = Steps(), []
    optimizer = torch.optim.SGD(told.layer.parameters(), 0.1)
    for _ in range(2):
        told().backward()
        optimizer.step()
    assert told.begun == [False, True]
