"""The sum of g_y's rows is found where it is one, whatever copies lie between, and only there."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.layers.bias import grad_bias, precedes

ROWS, OUTPUTS = (4, 6), 8


def traced(function, dtype=torch.float32):
    """(graph, g_y [L, O], the node that ``function`` makes of g [4, 6, O]) with another reader."""

    def both(g):
        made, rows = function(g), g.reshape(-1, OUTPUTS)
        return made, rows.mm(rows.t())

    gm = make_fx(both, tracing_mode="fake")(torch.randn(*ROWS, OUTPUTS, dtype=dtype))
    made, product = gm.graph.output_node().args[0]
    return gm.graph, product.args[0], made


def test_a_sum_over_all_rows_is_the_bias():
    _, g, made = traced(lambda g: g.sum((0, 1)))
    assert grad_bias(g) is made


def test_of_an_exact_copy_in_fp32_too():
    _, g, made = traced(lambda g: g.float().sum((0, 1)), torch.bfloat16)
    assert grad_bias(g) is made


def test_a_coarser_copy_is_another_sum():
    _, g, _ = traced(lambda g: g.bfloat16().sum((0, 1)))
    assert grad_bias(g) is None


def test_a_sum_over_some_rows_or_over_outputs_is_none():
    for dims in ((0,), (2,), (0, 2)):
        assert grad_bias(traced(lambda g, dims=dims: g.sum(dims))[1]) is None


def test_g_y_is_moved_before_the_sum_if_nothing_is_in_the_way():
    graph, g, total = traced(lambda g: g.sum((0, 1)))
    assert total < g
    assert precedes(g, total)
    assert g < total
    graph.lint()


def test_what_g_y_needs_cannot_be_moved():
    """g_y's own size depends on what comes after the sum."""
    graph, g, total = traced(lambda g: g.sum((0, 1)))
    late = graph.call_function(aten.sym_size.int, (g.args[0], 0))
    g.prepend(late)
    g.args = (g.args[0], [late, OUTPUTS])
    assert not precedes(g, total)
