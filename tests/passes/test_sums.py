"""Gradients of a weight that a step uses often are added as they are made."""

import functools

import pytest
import torch
from samples_graphs import given
from torch import fx, nn

from hot_compile.backend import hot
from hot_compile.memory import peak_bytes
from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.layers.sums import ADDED, add_as_made

aten = torch.ops.aten


def summed(ours, exact=0, read=None):
    """A sum of products of ours, then exact ones; ``read``: which partial sum is read besides."""
    graph = fx.Graph()
    sizes = {"a": ((8, 16), torch.int8), "b": ((4, 16), torch.int8), "s": ((), torch.float32)}
    a, b, s, x = given(graph, {**sizes, "x": ((8, 4), torch.float32)})
    end = graph.output(())
    emit = Emitter(graph, end, x)
    product = torch.ops.hot.scaled_int_mm.default
    terms = [emit(product, a, b, s, s, None, None, torch.float32) for _ in range(ours)]
    terms += [emit(aten.mul.Tensor, x, 2.0) for _ in range(exact)]
    total, sums = terms[0], []
    for term in terms[1:]:
        total = emit(aten.add.Tensor, total, term)
        sums.append(total)
    end.args = ((total, *([] if read is None else [emit(aten.neg.default, sums[read])])),)
    return graph


def additions(graph):
    found = [node.target for node in graph.nodes if len(node.all_input_nodes) == 2]
    return [target is ADDED for target in found if target in (ADDED, aten.add.Tensor)]


def test_products_of_ours_are_added_one_by_one():
    graph = summed(5)
    assert add_as_made(graph) == 4
    graph.lint()
    assert additions(graph) == [True] * 4


def test_what_else_is_added_stays_inductors():
    graph = summed(2, exact=3)
    assert add_as_made(graph) == 1
    assert additions(graph) == [True, False, False, False]


@pytest.mark.parametrize(
    "graph", [summed(3), summed(0, exact=6), summed(5, read=1), summed(5, read=3)], ids=str
)
def test_short_sums_sums_of_others_and_sums_that_are_read_stay(graph):
    """The last case is a gradient on its way: what reads the sum adds as it reads."""
    assert add_as_made(graph) == 0


def test_a_weighed_addition_keeps_its_weight():
    graph = summed(5)
    last = graph.output_node().args[0][0]
    last.kwargs = {"alpha": 2}
    assert add_as_made(graph) == 0


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        h = x
        for _ in range(12):
            h = torch.tanh(self.layer(h) + x)
        return h


@pytest.mark.slow
def test_the_peak_of_a_recurrent_net_is_about_stocks():
    model, x = Cell(), torch.randn(64, 256)
    peaks, gradients = {}, {}
    for name, backend in {
        "inductor": "inductor",
        "hot": functools.partial(hot, options={"min_gain": 0, "accept": "off"}),
    }.items():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)

        def step(compiled=compiled):
            model.zero_grad()
            compiled(x).square().mean().backward()

        step()
        gradients[name] = model.layer.weight.grad.clone()
        peaks[name] = peak_bytes(step, x.device)
    assert peaks["hot"] < 1.3 * peaks["inductor"]  # all twelve: 3 times
    off = (gradients["hot"] - gradients["inductor"]).norm() / gradients["inductor"].norm()
    assert off < 0.1
