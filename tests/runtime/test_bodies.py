"""A body that is compiled is compared once with its operators run one by one."""

import warnings

import pytest
import torch

from hot_compile.runtime.head import bodies

CODE = """
def forward(self, product_0, rows_0):
    p = torch.ops.aten._softmax.default(product_0, 1, False)
    return (torch.ops.aten.sum.dim_IntList(p * rows_0, [1], True), p - rows_0)
"""


def body(wrong, monkeypatch):
    """As CUDA's, its code compiled to ``wrong`` of what it should be."""

    def compiled(plain):
        return lambda *given: [wrong(value) for value in plain(*given)]

    monkeypatch.setattr(torch, "compile", compiled)
    return bodies.Function(CODE, True)


def first_chunk(function, rows=33, dtype=torch.float32):
    made, given = [torch.randn(rows, 50, dtype=dtype)], [torch.rand(rows, 1, dtype=dtype)]
    return function.agrees(function(*made, *given), made, given, [])


@pytest.mark.parametrize("rows", [1, 15, 17, 197])
def test_right_code_is_kept_and_compared_once(rows, monkeypatch):
    function = body(lambda value: value * 1.01, monkeypatch)
    assert first_chunk(function, rows)
    assert function.compiled
    monkeypatch.setattr(function, "_plain", None)
    assert first_chunk(function, rows)


@pytest.mark.parametrize(
    "wrong", [lambda v: 0 * v, lambda v: v / 0, lambda v: v.flip(0), lambda v: -v], ids=range(4)
)
def test_wrong_code_is_told_of_and_not_run_again(wrong, monkeypatch):
    function = body(wrong, monkeypatch)
    with pytest.warns(UserWarning, match="operator by operator.*off by"):
        assert not first_chunk(function)
    assert not function.compiled
    made, given = torch.randn(4, 50), torch.rand(4, 1)
    want = torch.softmax(made, 1) - given
    torch.testing.assert_close(function(made, given)[1], want)


@pytest.mark.parametrize(("worth", "times"), [(33 * 50, 1), (33 * 50 + 1, 0)])
def test_a_large_head_is_compiled_on_a_cpu_too(worth, times, monkeypatch):
    code = """
def forward(self, product_0, rows_0, shared_0):
    return (torch.ops.aten.sum.dim_IntList(product_0, [1], True), product_0 * 2.0)
"""
    text = bodies.Body(code, ((0, 0, -1),), ((1, "float32"),), (50,), (("rows", 0, 0),)).text()
    compiled = []
    monkeypatch.setattr(bodies, "WORTH", worth)
    monkeypatch.setattr(torch, "compile", lambda plain: compiled.append(plain) or plain)
    bodies.Function.of.cache_clear()
    x, weight = torch.randn(33, 8), torch.randn(50, 8)
    sums, gradient = torch.ops.hot.head_rows(text, [x], [weight])
    bodies.Function.of.cache_clear()
    assert len(compiled) == times
    torch.testing.assert_close(sums, (x @ weight.t()).sum(1, keepdim=True))
    torch.testing.assert_close(gradient, 2 * x @ weight.t() @ weight)


def test_rounding_that_the_operators_have_as_well_is_not_wrong(monkeypatch):
    code = """
def forward(self, product_0):
    return ((product_0 + 1000.0) - 1000.0,)
"""
    monkeypatch.setattr(torch, "compile", lambda plain: lambda x: [x])  # exact, unlike bf16's
    function = bodies.Function(code, True)
    x = torch.randn(40, 50, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function.agrees(function(x), [x], [], [])
    assert function.compiled
