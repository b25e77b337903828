"""Inductor is spared work, and writes the same code."""

import gc
import sys

import pytest
import sympy
import torch
import torch._inductor.lowering  # the rules are read off its operators
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen import cpp
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.loop_body import InterpreterShim
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges

from hot_compile.passes.spared_work import collected_later, spare_work
from hot_compile.runtime import ops  # noqa: F401  # registers the operators

spare_work()
strides = sys.modules[cpp.stride_at_vec_range.__module__]


def test_rules_for_dtypes_are_written_once():
    written = DtypePropagationOpsHandler().mul
    assert DtypePropagationOpsHandler().mul is written


def _rows(x):
    return torch.softmax(x, -1) * 3.0, x.amax(0)


def _turned(x):
    return x.t().contiguous() + 1.0


def _masked(x):
    return torch.nn.functional.pad(x, (1, 2)).roll(3, 0)[:, ::2] * x.argmax(0)[:34]


def _tail(x):
    """Fewer columns than a vector has, of which one operand is turned: their sums are a tail."""
    turned, straight = x[:4].t(), x.flatten()[: 4 * x.shape[1]].view(-1, 4)
    return (turned * straight).sum(0), turned.amax(0)


_PATCHED = (
    (ValueRanges, "__and__"),
    (InterpreterShim, "run"),
    (strides, "simplify_index_in_vec_range"),
)


@pytest.mark.parametrize(
    ("function", "length"),
    [
        pytest.param(_rows, 64, marks=pytest.mark.slow),  # whole vectors
        (_rows, 67),
        (_turned, 64),
        (_masked, 64),
        pytest.param(_tail, 64, marks=pytest.mark.slow),
        (_tail, 67),
    ],
)
def test_code_is_the_same(function, length, monkeypatch):
    x = torch.randn(64, length)

    def compiled():
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True):
            result, codes = run_and_get_code(torch.compile(function), x)
        return result, [line for line in codes[0].splitlines() if "AOT ID" not in line]

    spared, code = compiled()
    strides.stride_at_vec_range.cache_clear()
    for place, name in _PATCHED:
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    usual, usual_code = compiled()
    torch.testing.assert_close(spared, usual, rtol=0, atol=0)
    assert code == usual_code


@pytest.mark.parametrize("factor", [1, 3, 64])
def test_strides_are_what_simplified_indices_have(factor):
    var, other = sympy.symbols("x0 x1", integer=True)
    whole = strides.simplify_index_in_vec_range.__wrapped__
    for index in (factor * var + 7, 64 * other + var * factor, factor * FloorDiv(var, 16) + other):
        assert strides.stride_at_vec_range(index, var, 16) == strides.stride_at(
            whole(index, var, 16), var
        )


def test_a_fake_of_ours_is_found_once():
    with FakeTensorMode():
        x = torch.empty(64, 32)
        calls = [torch.ops.hot.quantize_rows(x, 8, True, True, False) for _ in range(2)]
        before = FakeTensorMode.cache_info().hits
        torch.ops.hot.quantize_rows(torch.empty(64, 32), 8, True, True, False)
        longer, _ = torch.ops.hot.quantize_rows(torch.empty(96, 32), 8, True, True, False)
    assert FakeTensorMode.cache_info().hits > before
    assert [part.shape for part in calls[0]] == [part.shape for part in calls[1]]
    assert longer.shape[0] == 96


def test_code_is_compiled_when_it_is_written(monkeypatch):
    order, compile_one, define = [], AsyncCompile.cpp_pybinding, PythonWrapperCodegen.define_kernel

    def compiled(self, kinds, source):
        order.append(source)
        return compile_one(self, kinds, source)

    def defined(*args, **kwargs):
        define(*args, **kwargs)
        order.append("defined")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", compiled)
    monkeypatch.setattr(PythonWrapperCodegen, "define_kernel", defined)
    torch._dynamo.reset()
    x = torch.randn(32, 96)
    with inductor_config.patch(force_disable_caches=True, compile_threads=2):
        result = torch.compile(_turned)(x)
    torch.testing.assert_close(result, _turned(x))
    first, then, again = order
    assert then == "defined"
    assert first == again


def test_garbage_is_looked_for_when_all_are_done():
    def fails():
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("a failed compile")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="failed"):
        collected_later()(fails)()
    assert gc.isenabled()
    gc.disable()
    with collected_later():
        pass
    found = gc.isenabled()
    gc.enable()
    assert not found, "somebody else had switched it off"


def test_graphs_are_compiled_without_looking_for_garbage(monkeypatch):
    seen, define = [], PythonWrapperCodegen.define_kernel

    def defined(*args, **kwargs):
        seen.append(gc.isenabled())
        return define(*args, **kwargs)

    monkeypatch.setattr(PythonWrapperCodegen, "define_kernel", defined)
    torch._dynamo.reset()
    layer = torch.nn.Linear(96, 32)
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(lambda x: layer(x).relu(), backend="hot")(torch.randn(32, 96))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
