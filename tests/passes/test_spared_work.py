"""Inductor is spared work, and writes the same code."""

import pytest
import torch
import torch._inductor.lowering  # the rules are read off its operators
from torch._inductor import config as inductor_config
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.loop_body import LoopBody
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import run_and_get_code
from torch.utils._sympy.value_ranges import ValueRanges

from hot_compile.passes.spared_work import spare_work

spare_work()


def test_rules_for_dtypes_are_written_once():
    written = DtypePropagationOpsHandler().mul
    assert DtypePropagationOpsHandler().mul is written


def _rows(x):
    return torch.softmax(x, -1) * 3.0, x.amax(0)


def _turned(x):
    return x.t().contiguous() + 1.0


@pytest.mark.parametrize(("function", "length"), [(_rows, 64), (_rows, 67), (_turned, 64)])
def test_code_is_the_same_and_what_is_left_of_nothing_is_not_written(function, length, monkeypatch):
    x = torch.randn(64, length)
    call, written = LoopBody.__call__, []
    monkeypatch.setattr(LoopBody, "__call__", lambda *a: written.append(a[0]) or call(*a))

    def compiled():
        written.clear()
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True):
            result, codes = run_and_get_code(torch.compile(function), x)
        kernels = [line for line in codes[0].splitlines() if "AOT ID" not in line]
        return result, kernels, len(written)

    spared, code, few = compiled()
    for place, name in ((SchedulerNode, "codegen"), (ValueRanges, "__and__")):
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    usual, usual_code, many = compiled()
    torch.testing.assert_close(spared, usual, rtol=0, atol=0)
    assert code == usual_code
    assert few < many if length == 64 else few <= many
