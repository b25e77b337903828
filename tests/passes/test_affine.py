"""Steps by channel on a restored image in one: the same values, and only where it is safe."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.graph import aten
from hot_compile.passes.storage.affine import fold_channel_steps
from hot_compile.runtime import pointwise  # noqa: F401  (registers hot::fourth_power)

ADD, SUB, MUL = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor


def graph_of(build, inputs):
    """What ``build(call, *placeholders)`` makes by ``call(op, *args)``, with fake values."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(op, *args):
        node = graph.call_function(op, args)
        fakes = fx.map_arg(args, lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = op(*fakes)
        return node

    nodes = []
    for index, value in enumerate(inputs):
        nodes.append(graph.placeholder(f"x{index}"))
        nodes[-1].meta["val"] = mode.from_tensor(value)
    graph.output(build(call, *nodes))
    return graph, nodes[0]


def run(graph, inputs):
    return fx.GraphModule({}, graph)(*inputs)


def count(graph, ops=(ADD, SUB, MUL)):
    """Operators of the size of the image."""
    return sum(n.target in ops and n.meta["val"].numel() > 64 for n in graph.nodes)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    image = torch.randn(2, 16, 5, 7).to(memory_format=torch.channels_last)
    vectors = [torch.randn(1, 16, 1, 1), torch.rand(1, 16, 1, 1), torch.rand(16, 1, 1)]
    return [image, *vectors, torch.randn(16, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_one_multiplication_and_one_sum(tensors, dtype):
    def norm(call, x, mean, rstd, weight, bias):
        scaled = call(MUL, call(MUL, call(SUB, x, mean), rstd), weight)
        return call(ADD, bias, scaled)

    tensors[0] = tensors[0].to(dtype)
    graph, image = graph_of(norm, tensors)
    want = run(graph, tensors)
    assert len(fold_channel_steps(image)) == 2
    graph.eliminate_dead_code()
    graph.lint()
    got = run(graph, tensors)
    assert count(graph) == 2
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # fp32, in another order


def test_what_others_read_in_between_stays(tensors):
    def norm(call, x, mean, rstd, weight, bias):
        centred = call(SUB, x, mean)
        scaled = call(MUL, call(MUL, centred, rstd), weight)
        return call(ADD, call(ADD, scaled, bias), centred)

    graph, image = graph_of(norm, tensors)
    want = run(graph, tensors)
    assert len(fold_channel_steps(image)) == 2
    graph.eliminate_dead_code()
    assert [n.target for n in image.users] == [SUB, MUL]
    torch.testing.assert_close(run(graph, tensors), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("same", [True, False])
def test_what_restores_an_image_goes_into_every_chain(tensors, same):
    """And the mean that is added to be taken away again is neither, if it is one tensor."""

    def norm(call, code, mean, rstd, weight, other):
        power = call(torch.ops.hot.fourth_power.default, code)
        image = call(ADD, call(MUL, power, rstd), mean)
        image = call(torch.ops.prims.convert_element_type.default, image, torch.float64)
        image = call(torch.ops.prims.convert_element_type.default, image, torch.float32)
        flat = call(aten.squeeze.dims, mean, [0, 2, 3])
        again = call(aten.unsqueeze.default, call(aten.unsqueeze.default, flat, 1), 1)
        centred = call(SUB, image, again if same else other)
        read = call(aten.relu.default, call(MUL, centred, weight))
        return call(MUL, centred, read)

    graph, _ = graph_of(norm, tensors)
    want = run(graph, tensors)
    (image,) = (n for n in graph.nodes if n.target is ADD)
    assert len(fold_channel_steps(image)) == (2 if same else 4)
    graph.eliminate_dead_code()
    graph.lint()
    assert count(graph, (ADD, SUB)) == (0 if same else 2)
    assert count(graph, (MUL,)) == 3
    torch.testing.assert_close(run(graph, tensors), want, rtol=1e-5, atol=1e-5)


def test_a_mean_that_was_saved_twice_is_one(tensors):
    """By two placeholders of a backward, one of which the forward gives as a view of the other."""

    def norm(call, code, mean, rstd, other, bias):
        image = call(ADD, call(MUL, call(torch.ops.hot.fourth_power.default, code), rstd), mean)
        again = call(torch.ops.prims.convert_element_type.default, other, torch.float32)
        return call(MUL, call(SUB, image, again), bias)

    tensors[3] = tensors[1].view(16, 1, 1)
    graph, _ = graph_of(norm, tensors)
    _, mean, _, other, _ = graph.find_nodes(op="placeholder")
    forward = fx.Graph()
    saved = forward.placeholder("mean")
    saved.meta["val"] = mean.meta["val"]
    view = forward.call_function(aten.squeeze.dims, (saved, [0]))
    view.meta["val"] = other.meta["val"]
    want = run(graph, tensors)
    (image,) = (n for n in graph.nodes if n.target is ADD)
    assert len(fold_channel_steps(image, {mean: saved, other: view})) == 1
    graph.eliminate_dead_code()
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=ADD)
    assert not mean.users
    assert not other.users
    torch.testing.assert_close(run(graph, tensors), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "steps",
    [
        lambda call, x, a, b, c, d: call(MUL, call(SUB, x, a), b),  # too short
        lambda call, x, a, b, c, d: call(ADD, call(MUL, call(SUB, a, x), b), c),  # a - x
        lambda call, x, a, b, c, d: call(ADD, call(MUL, call(ADD, x, x), b), c),
    ],
)
def test_others_stay(tensors, steps):
    graph, image = graph_of(steps, tensors)
    before = [n.target for n in graph.nodes]
    assert len(fold_channel_steps(image)) == 0
    assert [n.target for n in graph.nodes] == before


def test_vectors_along_other_dimensions_stay(tensors):
    tensors[1] = torch.randn(7)  # along the width

    def steps(call, x, a, b, c, d):
        return call(ADD, call(MUL, call(SUB, x, a), b), c)

    _graph, image = graph_of(steps, tensors)
    assert len(fold_channel_steps(image)) == 0


@pytest.mark.parametrize("order", [(ADD, MUL, ADD), (MUL, SUB, MUL), (ADD, ADD, SUB), (MUL,) * 3])
def test_any_order_of_steps(tensors, order):
    def steps(call, x, *vectors):
        for op, vector in zip(order, vectors, strict=False):
            x = call(op, x, vector)
        return x

    graph, image = graph_of(steps, tensors)
    want = run(graph, tensors)
    assert len(fold_channel_steps(image)) == len({op is MUL for op in order})
    graph.eliminate_dead_code()
    torch.testing.assert_close(run(graph, tensors), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_vector_that_is_part_of_another_keeps_its_place():
    """Compiled: what is read from memory must be the second half, not the first."""
    torch.manual_seed(0)
    image = torch.randn(2, 16, 5, 7).to(memory_format=torch.channels_last)
    both = torch.randn(32, 1, 1)

    def steps(call, x, vectors):
        half = call(aten.slice.Tensor, vectors, 0, 16, 32)
        return call(ADD, call(SUB, call(MUL, x, half), half), half)

    graph, node = graph_of(steps, [image, both])
    want = run(graph, [image, both])
    assert len(fold_channel_steps(node)) == 2
    graph.eliminate_dead_code()
    got = torch.compile(fx.GraphModule({}, graph))(image, both)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
