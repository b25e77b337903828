"""Where a look may cut a graph: not inside a mode, nor where a value is changed in place."""

import pytest
import torch
import torch.nn.functional as F
from samples_looks import Least, graph_of

from hot_compile.again import Again
from hot_compile.observing.stretches import Sizes, can_be_cut
from hot_compile.observing.walk import Graph, Walk
from hot_compile.passes.measure.sketch import sketch

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def switching(x, w):
    """A mode on and off, and a value that is changed where it was made."""
    with torch.autocast("cpu", torch.bfloat16):
        y = (x @ w).relu()
        y = y @ w
    z = y.float() * 2
    z[:, 0] = 0
    z += x
    with torch.no_grad():
        scale = z.abs().amax()
        scale = scale * 2
    return (z / scale).sin().sum()


def test_modes_and_changes_in_place_are_not_cut_in_two():
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    gm = graph_of(switching, x, w)
    (want,) = torch.autograd.grad(switching(x, w), w)
    assert can_be_cut(Sizes(gm))
    given = [w if n.meta["example_value"].requires_grad else x for n in inputs_of(gm)]
    places, found = walked(gm, given)
    assert 5 <= len(places) < len(Sizes(gm).nodes) - 5
    (got,) = found.values()  # two casts of w, where one stretch has one: half their gradients' sum
    torch.testing.assert_close(got, sketch(want), rtol=1e-2, atol=1e-2)
    assert not torch.is_autocast_enabled("cpu")


def joined(x, w):
    """A mask that is changed by an operator."""
    mask = x @ w > 0
    mask |= x > 1
    return (x @ w) * mask


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: F.leaky_relu(x @ w, 0.2, True),
        lambda x, w: F.hardtanh(x @ w, -1.0, 1.0, True),
        lambda x, w: F.hardswish(x @ w, True),
        lambda x, w: F.elu(x @ w, inplace=True),
        lambda x, w: F.threshold_(x @ w, 0.0, 0.0),
        joined,
    ],
    ids=["leaky_relu", "hardtanh", "hardswish", "elu", "threshold_", "or"],
)
def test_no_cut_is_between_what_is_made_and_its_change_in_place(change):
    """A stretch would begin with a leaf, which autograd lets nobody change."""

    def function(x, w):
        return change(x, w).sin().sum()

    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    gm = graph_of(function, x, w)
    (want,) = torch.autograd.grad(function(x, w), w)
    given = [w if n.meta["example_value"].requires_grad else x for n in inputs_of(gm)]
    places, found = walked(gm, given)
    assert len(places) > 2
    (got,) = found.values()
    torch.testing.assert_close(got, sketch(want))


def inputs_of(gm):
    return gm.graph.find_nodes(op="placeholder")


def walked(gm, args):
    """(where a graph is cut if it is wherever it can be, sketches of gradients)."""

    class Noted(Walk):
        def _tries(self, first, *given):
            places.append(first)
            return super()._tries(first, *given)

    places, sizes = [], Sizes(gm)
    graph = Graph(gm, sizes, False, None, {n: n.name for n in inputs_of(gm)}, None)
    look = Noted(graph, Again(args, frozenset()), {0: torch.ones(())}, Least(args), False)
    look.run()
    return places, look.found


def test_a_buffer_that_is_changed_and_read_keeps_a_graph_in_one_piece():
    def counts(x, n):
        n.add_(1)
        return (x * n).sum()

    def counts_only(x, n):
        n.add_(1)
        return x.sin().sum()

    x, n = torch.randn(4, requires_grad=True), torch.zeros(4)
    assert not can_be_cut(Sizes(graph_of(counts, x, n)))
    assert can_be_cut(Sizes(graph_of(counts_only, x, n)))
