"""Facts of a step's graphs: what nodes say of themselves, at every stage."""

import pytest
import torch
from torch import nn

from hot_compile import explain, graphs
from hot_compile.record import NO_PLAN, GraphReport

OPTIONS = {"min_gain": 0, "memory_min_bytes": 1}


def mlp():
    layers = {"fc1": nn.Linear(64, 96), "act": nn.GELU(), "norm": nn.LayerNorm(96)}
    model = nn.Sequential()
    for name, layer in {**layers, "fc2": nn.Linear(96, 64), "head": nn.Linear(64, 10)}.items():
        model.add_module(name, layer)
    return model


@pytest.fixture(scope="module")
def report():
    (found,) = explain(mlp(), torch.randn(64, 64), options=OPTIONS).graphs
    return found


def test_nodes_know_their_layer_side_and_size(report):
    nodes = graphs.stage_of(report, "after").nodes
    products = [n for n in nodes if "scaled_int_mm" in n.target]
    assert {n.layer for n in products} == {"fc1", "fc2"}
    assert {n.side for n in products} == {"backward"}
    (forward,) = (n for n in nodes if n.layer == "fc1" and "addmm" in n.target)
    assert (forward.side, forward.shape, forward.dtype) == ("forward", ("64", "96"), "float32")
    assert forward.bytes == 64 * 96 * 4


def test_stages_differ_as_the_pipeline_says(report):
    before, after = (graphs.stage_of(report, stage).nodes for stage in ("before", "after"))
    assert not any("hot." in n.target for n in before)
    assert any("hot.scaled_int_mm" in n.target for n in after)
    assert any("hot.scaled_int_mm" in n.target for n in report.stages[graphs.BACKWARD].nodes)


def test_the_backward_reads_what_the_forward_stored(report):
    forward, backward = (report.stages[side] for side in (graphs.FORWARD, graphs.BACKWARD))
    arrived = graphs.arrivals(forward, backward)
    given = {n.name for n in backward.nodes if n.op == "placeholder" and "tangents" not in n.target}
    assert given == arrived.keys()
    assert {part for c in report.crossing for part in c.parts} <= given | set(arrived.values())


def test_symbolic_sizes_keep_their_symbol():
    x = torch.randn(64, 64)
    torch._dynamo.mark_dynamic(x, 0)
    (report,) = explain(mlp(), x, options=OPTIONS).graphs
    for stage in report.stages.values():
        shapes = [n.shape for n in stage.nodes if "addmm" in n.target]
        assert all(any("s" in size for size in shape) for shape in shapes), shapes


def test_only_who_asks_gets_graphs():
    with pytest.raises(ValueError, match=r"expected one of hot_compile\.explain"):
        graphs.stage_of(GraphReport(NO_PLAN, ()), "before")
