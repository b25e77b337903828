"""Small questions about graphs, each on a graph made by hand."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base import graph as questions
from hot_compile.passes.base.graph import aten


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']._modules['blocks']._modules['0'].qkv", "blocks.0.qkv"),
        ("L['self'].__dict__['_modules']['base'].fc", "base.fc"),
        ("L['fn'].__self__._modules['0']", "0"),
        ("G['model'].layers[3]['up']", "layers.3.up"),
        ("L['self']._parameters['weight']", "weight"),
        ("L['self']", ""),
    ],
)
def test_paths_of_modules(source, path):
    assert questions.clean_path(source) == path


def test_transposes_are_counted():
    gm = make_fx(lambda x: (x.t(), x.t().t(), x.permute(0, 1), x.mT))(torch.randn(3, 4))
    x = questions.placeholders(gm.graph)[0]
    found = [questions.untranspose(node) for node in questions.returned(gm.graph)]
    assert found == [(x, True), (x, False), (x, False), (x, True)]


def test_what_depends_on_what():
    gm = make_fx(lambda x, tangents_1: (x.sin().cos(), x.sin() * tangents_1))(*torch.randn(2, 3))
    cos, product = questions.returned(gm.graph)
    (sin, *_) = [node for node in gm.graph.nodes if node.target is aten.sin.default]
    assert cos in questions.closure([sin])
    assert questions.made_of(cos) == {*questions.placeholders(gm.graph)[:1], *cos.args, cos}
    assert questions.reaches(sin, set(), lambda user: user is cos)
    assert not questions.reaches(sin, set(), lambda user: user is product.args[1])
    backward = {questions.placeholders(gm.graph)[1], product, gm.graph.output_node()}
    assert questions.made_of_tangents(gm.graph) == backward


def test_settling_keeps_an_order_as_far_as_operands_come_first():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second, third = (graph.call_function(f, (x,)) for f in (torch.sin, torch.cos, torch.exp))
    last = graph.call_function(torch.add, (first, third))
    graph.output((second, last))
    questions.settle(graph, {x: 0, second: 1, last: 2, first: 3, third: 4})
    names = [node.target for node in graph.nodes if node.op == "call_function"]
    assert names == [torch.cos, torch.sin, torch.exp, torch.add]
    graph.lint()


def test_arguments_by_name():
    gm = make_fx(lambda x: aten.sum.dim_IntList(x, [1], keepdim=True))(torch.randn(3, 4))
    (total,) = [node for node in gm.graph.nodes if node.target is aten.sum.dim_IntList]
    named = dict(questions.named_arguments(total))
    assert named["dim"] == [1]
    assert "self" in named


def test_a_list_of_operands_ends_the_way_back():
    gm = make_fx(lambda x: torch.cat([x.t(), x.t()]).t().t())(torch.randn(3, 3))
    (joined,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    kinds = {aten.t.default, aten.cat.default}
    assert questions.strip(gm.graph.output_node().args[0], kinds) is joined
