"""What a GPU's backward writes to memory although Inductor may work it out in each reader."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.storage.pieces import materialise


def residual(device, norms=2):
    """A gradient that passes ``norms`` norms' backwards and is added up: its sums' nodes, graph."""
    graph, sums = fx.Graph(), []
    gradient = graph.placeholder("tangents_1")
    with FakeTensorMode():
        gradient.meta["val"] = torch.empty(8, 64, device=device)
    end = graph.output(())
    emit = Emitter(graph, end, gradient)
    for _ in range(norms):
        total = emit(aten.sum.dim_IntList, gradient, [1], True)
        branch = emit(aten.sub.Tensor, emit(aten.mul.Tensor, gradient, 2.0), total)
        gradient = emit(aten.add.Tensor, gradient, branch)
        sums.append(gradient)
    end.args = (emit(aten.mm.default, emit(aten.t.default, gradient), gradient),)
    return graph, sums


def test_a_sum_behind_a_norm_is_read_from_memory():
    graph, (first, last) = residual("cuda")
    assert materialise(graph) == 2
    for node in (first, last):
        (read,) = node.users
        assert read.target is aten.as_strided.default
        assert len(read.users) > 1
    graph.lint()


def test_other_devices_and_single_readers_are_left_alone():
    graph, _ = residual("cpu")
    before = str(graph)
    assert materialise(graph) == 0
    assert str(graph) == before
