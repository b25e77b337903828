"""Graphs of a step as networkx: what nodes say of themselves, parts of them."""

import networkx
import pytest
import torch
from torch import nn

from hot_compile import explain, graphs
from hot_compile.record import NO_PLAN, GraphReport
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 0, "memory_min_bytes": 1}


def mlp(first="fc1"):
    layers = {first: nn.Linear(64, 96), "act": nn.GELU(), "norm": nn.LayerNorm(96)}
    model = nn.Sequential()
    for name, layer in {**layers, "fc2": nn.Linear(96, 64), "head": nn.Linear(64, 10)}.items():
        model.add_module(name, layer)
    return model


@pytest.fixture(scope="module")
def explained():
    return explain(mlp(), torch.randn(64, 64), options=OPTIONS)


def test_nodes_know_their_layer_side_size_and_strategy(explained):
    graph = explained.graph
    products = {n: a for n, a in graph.nodes(data=True) if "scaled_int_mm" in a["target"]}
    assert {a["layer"] for a in products.values()} == {"fc1", "fc2"}
    for own in products.values():
        assert (own["side"], own["strategy"], own["graph"]) == ("backward", "int8", 0)
    calls = (own for own in graph.nodes.values() if own["layer"] == "fc1")
    (forward,) = (own for own in calls if "addmm" in own["target"])
    assert (forward["side"], forward["shape"], forward["dtype"]) == (
        "forward",
        "64 x 96",
        "float32",
    )
    assert forward["bytes"] == 64 * 96 * 4


@pytest.mark.parametrize("stage", graphs.STAGES)
def test_every_stage_has_what_crosses_and_as_what(explained, stage):
    (report,) = explained.graphs
    graph = graphs.digraph(report, stage)
    for c in report.crossing:
        own = graph.nodes[c.name]
        assert (own["crosses_as"], own["stored_bytes"]) == (c.scheme, c.bytes)
    assert networkx.is_directed_acyclic_graph(graph)
    assert any(own["output"] for own in graph.nodes.values())


def test_stages_differ_as_the_pipeline_says(explained):
    (report,) = explained.graphs

    def operators(stage):
        return {own["target"] for own in graphs.digraph(report, stage).nodes.values()}

    assert not any("hot." in target for target in operators("before"))
    assert any("hot.scaled_int_mm" in target for target in operators("after"))
    assert any("hot.scaled_int_mm" in target for target in operators("stored"))


def test_the_backward_reads_what_the_forward_stored(explained):
    """Forward and backward hang together by nothing but what crosses, parameters included."""
    (report,) = explained.graphs
    graph = graphs.digraph(report, "stored")
    side = graph.nodes(data="side")
    bridges = {a for a, b in graph.edges if side[a] == "forward" and side[b] == "backward"}
    assert bridges
    for name in bridges:
        assert graph.nodes[name]["crosses_as"]
    fed = {b for b in graph if side[b] == "backward" and not graph.pred[b]}
    tangents = {b for b in fed if "tangents" in graph.nodes[b]["target"]}
    made_of_nothing = ("full", "iota", "seed", "scalar_tensor", "empty")
    for name in fed - tangents:
        assert any(word in graph.nodes[name]["target"] for word in made_of_nothing), name


def test_a_layers_neighbourhood(explained):
    graph = graphs.digraph(explained.graphs[0])
    alone, around = (graphs.neighbourhood(graph, "fc1", radius) for radius in (0, 1))
    assert {own["layer"] for own in alone.nodes.values()} == {"fc1"}
    assert set(alone) < set(around) < set(graph)
    assert "act" in {own["layer"] for own in around.nodes.values()}
    assert all(graph.has_edge(*edge) for edge in around.edges)
    assert list(around) == [name for name in graph if name in around]


def test_a_block_is_a_layer_and_an_unknown_one_an_error():
    model = nn.Sequential()
    model.add_module("block", mlp())
    model.add_module("block2", nn.Linear(10, 8))
    graph = explain(model, torch.randn(64, 64), options=OPTIONS).graph
    block = graphs.neighbourhood(graph, "block", 0)
    assert "block.fc1" in {own["layer"] for own in block.nodes.values()}
    assert "block2" not in {own["layer"] for own in block.nodes.values()}
    with pytest.raises(KeyError, match="got layer 'blok'; the graph has"):
        graphs.neighbourhood(graph, "blok")


def test_symbolic_sizes_keep_their_symbol():
    x = torch.randn(64, 64)
    torch._dynamo.mark_dynamic(x, 0)
    (report,) = explain(mlp(), x, options=OPTIONS).graphs
    for stage in graphs.STAGES:
        graph = graphs.digraph(report, stage)
        shapes = {own["shape"] for own in graph.nodes.values() if "addmm" in own["target"]}
        assert any("s" in shape for shape in shapes), shapes
        assert networkx.is_directed_acyclic_graph(graph)
    stored = graphs.digraph(report, "stored")
    loose = [n for n, own in stored.nodes.items() if own["op"] == "placeholder" and not stored[n]]
    assert all(stored.nodes[n]["side"] == "forward" for n in loose)


def test_only_who_asks_gets_graphs():
    with pytest.raises(ValueError, match=r"expected one of hot_compile\.explain"):
        graphs.digraph(GraphReport(NO_PLAN, ()), "before")
    _, (report,) = hot_step(lambda x: mlp()(x).sum(), torch.randn(64, 64), options=OPTIONS)
    with pytest.raises(ValueError, match="expected one of \\['before', 'after', 'stored'\\]"):
        graphs.digraph(report, "later")
