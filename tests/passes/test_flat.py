"""What is made of restored tensors over one line of memory is what it was."""

import re

import absent_gpu
import pytest
import torch
from forked import in_a_process
from test_pieces import drawn_planes, planes_and_gradient
from torch import fx, nn

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.storage.flat import work_out_flat

aten = torch.ops.aten
ROWS, WIDTH = 8, 256  # 16 groups of 128


def backward_of(make, device="cuda"):
    """A graph that returns what ``make(emit, restored, gradient)`` gives."""
    graph, planes, gradient = planes_and_gradient(device)
    end = graph.output(())
    emit = Emitter(graph, end, gradient)
    x = emit(torch.ops.hot.restored_planes.default, *planes, 4, 30, True)
    x = emit(aten.view.default, x, [ROWS, WIDTH])
    gradient = emit(aten.cat.default, [gradient, gradient], 1)
    end.args = (tuple(make(emit, x, gradient)),)
    return graph


def product(emit, x):
    return emit(aten.mm.default, emit(aten.permute.default, x, [1, 0]), x)


def activation(emit, x, gradient):
    """What a library reads of the tensor, and the gradient behind it."""
    slope = emit(aten.mul.Tensor, emit(aten.cos.default, x), gradient)
    return product(emit, emit(aten.sin.default, x)), product(emit, emit.cast(slope, torch.bfloat16))


def scaled(emit, x, gradient):
    number = emit(aten.full.default, [], 0.5)
    return [product(emit, emit(aten.mul.Tensor, emit(aten.add.Tensor, x, 1.0), number))]


def broadcast(emit, x, gradient):
    """Before the line ends: what reads a row's number with it."""
    row = emit(aten.sum.dim_IntList, gradient, [1], True)
    return [product(emit, emit(aten.sub.Tensor, emit(aten.sin.default, x), row))]


def summed(emit, x, gradient):
    return [emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, x, gradient), [1])]


def transposed(emit, x, gradient):
    other = emit(aten.permute.default, emit(aten.view.default, gradient, [WIDTH, ROWS]), [1, 0])
    return [product(emit, emit(aten.mul.Tensor, emit(aten.sin.default, x), other))]


def softmax(emit, x, gradient):
    """A softmax's backward, of samples and heads: behind it x is read transposed, and cast there;
    before it comes a product in bf16, of another shape."""
    sizes = [2, 2, ROWS // 4, WIDTH]
    square = emit(aten.mm.default, emit(aten.permute.default, gradient, [1, 0]), gradient)
    g = emit.cast(emit(aten.mm.default, gradient, square), torch.bfloat16)
    g = emit(aten.view.default, emit.cast(emit(aten.clone.default, g), torch.float32), sizes)
    x = emit(aten.expand.default, emit(aten.view.default, x, sizes), sizes)
    scaled = emit(aten.mul.Tensor, g, x)
    whole = emit(aten.sum.dim_IntList, scaled, [-1], True)
    inner = emit(aten.sub.Tensor, scaled, emit(aten.mul.Tensor, x, whole))
    inner, x = (emit(aten.view.default, n, [2, ROWS // 2, WIDTH]) for n in (inner, x))
    turned = emit.cast(emit(aten.permute.default, x, [0, 2, 1]), torch.bfloat16)
    return [emit(aten.bmm.default, turned, emit.cast(inner, torch.bfloat16)), whole]


def mask_of(emit, x, sizes):
    """A restored mask, of as many elements as x."""
    (lower,) = (node for node in x.graph.nodes if node.name == "lower")
    packed = emit(aten.clone.default, emit(aten.slice.Tensor, lower, 1, 0, 16))
    mask = emit(torch.ops.hot.restored_bits.default, packed)
    return emit.cast(emit(aten.view.default, mask, sizes), torch.float32)


def dropped_softmax(emit, x, gradient):
    """A softmax's backward behind a dropout's, and what a product reads of both."""
    sizes = [2, 2, ROWS // 4, WIDTH]
    mask, g = mask_of(emit, x, sizes), emit(aten.view.default, gradient, sizes)
    x = emit(aten.view.default, x, sizes)
    g = emit(aten.mul.Tensor, g, emit(aten.mul.Tensor, mask, 1.25))
    scaled = emit(aten.mul.Tensor, g, x)
    whole = emit(aten.sum.dim_IntList, scaled, [-1], True)
    inner = emit(aten.sub.Tensor, scaled, emit(aten.mul.Tensor, x, whole))
    dropped = emit(aten.mul.Tensor, x, mask)
    return [product(emit, emit(aten.view.default, n, [ROWS, WIDTH])) for n in (inner, dropped)]


def dropped(emit, x, gradient):
    """A dropout's backward alone."""
    mask = mask_of(emit, x, [ROWS, WIDTH])
    return [product(emit, emit(aten.mul.Tensor, gradient, mask))]


def results(graph):
    draw = torch.Generator().manual_seed(0)
    planes, gradient = drawn_planes(draw), torch.randn(8, 128, generator=draw)
    return fx.GraphModule({}, graph)(*planes, gradient)


def worked_out_flat(make, restored):
    """The graph of ``make`` once ``restored`` tensors are: it gives what it gave."""
    graph = backward_of(make)
    expected = results(graph)
    assert work_out_flat(graph) == restored
    graph.lint()
    for got, want in zip(results(graph), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return graph


@pytest.mark.parametrize(
    ("make", "operators"),
    [(activation, 4), (scaled, 2), (broadcast, 1), (summed, 1), (transposed, 1)],
    ids=["activation", "scaled", "broadcast", "summed", "transposed"],
)
def test_it_is_the_same_and_elementwise_operators_go_along_one_line(make, operators):
    graph = worked_out_flat(make, 1)
    (restored,) = graph.find_nodes(op="call_function", target=torch.ops.hot.restored_planes.default)
    assert restored.args[0].meta["val"].shape == (16, 32, 1)
    line = [n for n in graph.nodes if n.op == "call_function" and n.meta["val"].dim() == 1]
    line = [n for n in line if torch.Tag.pointwise in n.target.tags]
    assert len(line) == operators


def test_what_sums_up_rows_goes_over_all_rows_as_one_dimension():
    graph = worked_out_flat(softmax, 1)
    elementwise = [n for n in graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())]
    assert {n.meta["val"].dim() for n in elementwise} <= {1, 2}
    (total,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert total.meta["val"].shape == (ROWS, 1)
    # x is cast once, in its own order; the product's result in bf16 is cast as the line that it is
    (turned,) = [n for n in graph.nodes if n.target is aten.bmm.default]
    assert turned.args[0].target is aten.permute.default
    casts = [n for n in elementwise if n.target is torch.ops.prims.convert_element_type.default]
    (widened,) = [n for n in casts if n.args[1] is torch.float32]
    assert widened.args[0].target is aten.view.default


def test_what_a_mask_is_applied_to_goes_over_rows_with_the_softmax_behind_it():
    graph = worked_out_flat(dropped_softmax, 2)
    elementwise = [n for n in graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())]
    shapes = {tuple(n.meta["val"].shape) for n in elementwise if n.target is not aten.clone.default}
    assert shapes == {(ROWS, WIDTH)}


def test_what_is_made_of_a_mask_alone_stays():
    graph = backward_of(dropped)
    x = graph.find_nodes(op="call_function", target=torch.ops.hot.restored_planes.default)
    graph.eliminate_dead_code()  # nobody reads x
    assert x[0] not in graph.nodes
    before = str(graph)
    work_out_flat(graph)
    assert str(graph) == before


def test_nothing_is_done_on_a_cpu_or_where_nothing_is_restored():
    graph = backward_of(activation, device="cpu")
    before = str(graph)
    assert work_out_flat(graph) == 0
    assert str(graph) == before
    assert work_out_flat(fx.Graph()) == 0


def mlp():
    model = nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 1152), nn.GELU(), nn.Linear(1152, 384))
    x = torch.randn(4096, 384)
    return model, lambda forward: forward(x).square().mean()


def kernels(folder):
    """Sources of the backward's kernels that read planes, as written for a GPU."""
    codes = absent_gpu.codes_of(mlp, {"min_gain": 100, "memory": "all"}, folder)
    return [source for _, source in absent_gpu.KERNEL.findall(codes[-1]) if "'*i16'" in source]


@pytest.mark.slow
def test_a_kernel_that_restores_knows_neither_rows_nor_columns(tmp_path):
    (source,) = in_a_process(kernels, str(tmp_path))
    assert re.search(r"x0 = xindex\n", source)
    assert "xindex %" not in source
