"""What an adapter's backward scales by a number is small."""

import dataclasses

import pytest
import torch
from samples_graphs import given
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.exact.scalars import scale_behind

aten = torch.ops.aten
H200 = dataclasses.replace(RATES["sm90"], launch=0.0)
ROWS, WIDE, RANK, INPUTS = 197, 96, 4, 40


def adapter(number=0.7, dtype=torch.bfloat16, rank=RANK, base=True, also=False):
    """Gradients of a layer with an adapter: of x, of what A makes, and of B.

    ``base``: the layer's own product reads the gradient; ``also``: what is scaled is returned, too.
    """
    graph = fx.Graph()
    sizes = {"g": (1, ROWS, WIDE), "w": (WIDE, INPUTS), "b": (WIDE, rank), "a": (ROWS, rank)}
    g, w, b, a = given(graph, {name: (size, dtype) for name, size in sizes.items()})
    end = graph.output(())
    emit = Emitter(graph, end, g)
    scaled = emit(aten.mul.Tensor, g, number)
    rows = emit(aten.view.default, scaled, [ROWS, WIDE])
    results = [
        emit(aten.mm.default, rows, b),
        emit(aten.mm.default, emit(aten.permute.default, rows, [1, 0]), a),
    ]
    if base:
        results.append(emit(aten.mm.default, emit(aten.view.default, g, [ROWS, WIDE]), w))
    end.args = ((*results, *([scaled] if also else [])),)
    return graph


def run(graph, dtype=torch.bfloat16):
    torch.manual_seed(0)
    values = [
        torch.randn(n.meta["val"].shape).to(dtype) for n in graph.find_nodes(op="placeholder")
    ]
    return fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*values)


@pytest.mark.parametrize("number", [2, 0.5, 0.7])
def test_small_products_are_scaled(number):
    graph, before = adapter(number), run(adapter(number))
    assert scale_behind(graph, lambda _: H200) == 1
    graph.lint()
    graph.eliminate_dead_code()
    (small, weight) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert small.meta["val"].shape == (ROWS, RANK)
    assert weight.meta["val"].shape == (WIDE, RANK)
    after, truth = run(graph), run(adapter(number, torch.float64), torch.float64)
    for one, other, true in zip(before, after, truth, strict=True):
        if number in (2, 0.5):
            assert torch.equal(one, other)
        assert (other - true).norm() <= 1.1 * (one - true).norm()  # one rounding for another


@pytest.mark.parametrize(
    "changes",
    [
        {"base": False},  # nobody else has it written
        {"rank": 64},  # what comes out is as large
        {"also": True},  # it is wanted itself
        {"dtype": torch.float16},  # what is not scaled may leave its range
    ],
    ids=str,
)
def test_the_rest_stays(changes):
    graph = adapter(**changes)
    before = str(graph)
    assert scale_behind(graph, lambda _: H200) == 0
    assert str(graph) == before


def test_a_kernel_more_has_its_price():
    assert scale_behind(adapter(), lambda _: RATES["sm90"]) == 0
    assert scale_behind(adapter(), lambda _: RATES["cpu"]) == 0
    assert scale_behind(adapter(), lambda _: None) == 0
