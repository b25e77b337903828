"""What a norm reads is made again of what the norm made: of its result, deviation and mean."""

import pytest
import torch
from samples_graphs import given
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten, placeholders
from hot_compile.passes.storage.layout import _MARK as LIES_CHANNELS_LAST
from hot_compile.passes.storage.put_back import give_back, put_back, puts_back, steps_of_norm
from hot_compile.passes.storage.store import store

SIZE = (4, 8, 16, 16)


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def of(graph, target):
    return graph.find_nodes(op="call_function", target=target)[-1]


def normed(x, scaled=True, own=True, wide=False):
    """A norm's result: by groups, or by as many numbers as ``x`` has."""
    whole = x if own else x.cos()
    var, mean = torch.var_mean(whole.view(4, 2, -1), 2, unbiased=False)
    if wide:
        mean = whole.mean(0, keepdim=True).expand(SIZE)
    else:
        mean, var = (t.view(4, 2, 1).expand(4, 2, 4).reshape(4, 8, 1, 1) for t in (mean, var))
    distance = x - mean
    return distance * torch.rsqrt(var + 1e-5) if scaled else distance


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        ({}, 2),
        ({"scaled": False}, 1),
        ({"own": False}, 0),  # distance and mean may be larger than x, and cancel
        ({"scaled": False, "wide": True}, 0),
    ],
)
def test_the_steps_of_a_norm(facts, count):
    graph, (back, _) = traced(lambda x: normed(x, **facts), torch.randn(SIZE)), backward(late=False)
    (x,) = placeholders(graph)
    result, later = (
        of(g, aten.mul.Tensor if facts.get("scaled", True) else aten.sub.Tensor)
        for g in (graph, back)
    )
    found = steps_of_norm(result, x, later)
    assert len(found) == count
    assert not found or found[-1] is later
    assert steps_of_norm(of(graph, aten.sub.Tensor).args[1], x, later) == ()
    assert steps_of_norm(result, x, result) == (), "its mean is made of what is to be made of it"


def backward(late):
    """(graph, nodes) of a backward that has x, and its norm of mean and deviation that come in."""

    def function(x, made, mean, rstd):
        before = x.half().sin()
        spread = [t.view(4, 2, 1).expand(4, 2, 4).reshape(4, 8, 1, 1) for t in (mean, rstd)]
        result = (x - spread[0]) * spread[1]
        return (before if late else x.half().cos()), made + result

    given = torch.randn(SIZE), torch.randn(SIZE), torch.randn(4, 2), torch.rand(4, 2) + 1
    return traced(function, *given), given


@pytest.mark.parametrize("late", [False, True])
def test_what_was_read_is_made_of_the_result(late):
    graph, (x, _, mean, rstd) = backward(late)
    restored, made, *_ = placeholders(graph)
    result = of(graph, aten.mul.Tensor)
    steps = (result.args[0], result)
    run = fx.GraphModule({}, graph)
    wide = [t.view(4, 2, 1).expand(4, 2, 4).reshape(4, 8, 1, 1) for t in (mean, rstd)]
    norm = (x - wide[0]) * wide[1]
    want = run(x, norm, mean, rstd)
    names = {node.name for node in graph.nodes}
    put_back(restored, made, steps)
    graph.lint()
    run.recompile()
    got = run(torch.full(SIZE, torch.nan), norm, mean, rstd)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-3, atol=2e-3)  # half's
    assert sum(map(puts_back, graph.nodes)) == len(steps)
    added = {node.name for node in graph.nodes} - names
    assert added
    assert all("_again" in name for name in added), "no name that something has in the forward"
    give_back(graph, restored)
    graph.eliminate_dead_code()
    run.recompile()
    assert not any(map(puts_back, graph.nodes))
    for a, b in zip(run(x, norm, mean, rstd), want, strict=True):
        assert torch.equal(a, b)


def test_without_steps_nothing_is_put_back():
    graph, _ = backward(late=False)
    restored, made, *_ = placeholders(graph)
    put_back(restored, made, ())
    assert not any(map(puts_back, graph.nodes))


@pytest.mark.parametrize("size", [(2, 8, 4, 4), (2, 8, 16)])
def test_a_copy_that_has_an_images_name_is_laid_as_one_if_it_may_be_it(size):
    """An autoencoder's backward copies a norm's numbers, by the name that an image has before."""
    forward, back = fx.Graph(), fx.Graph()
    (x,) = given(forward, {"x": ((2, 8, 4, 4), torch.float32)})
    (y,) = given(back, {"tangents_1": (size, torch.float32)})
    image, copy = (g.call_function(aten.clone.default, (n,)) for g, n in ((forward, x), (back, y)))
    for node, source in ((image, x), (copy, y)):
        node.name, node.meta["val"] = "clone_7", source.meta["val"]
    image.meta[LIES_CHANNELS_LAST] = True
    forward.output((image,))
    back.output((copy,))
    assert store(forward, back, 1, {}) == {}
    laid = copy.kwargs.get("memory_format") is torch.channels_last
    assert laid is (len(size) == 4)
