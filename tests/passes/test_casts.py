"""Casts of weights in groups: which, how large, and that they say what single casts say."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import casts
from hot_compile.runtime.casts import lowered

BF16 = torch.bfloat16


def layers(count=3, device="cuda", size=64, dtype=torch.float32, read=None):
    """``count`` layers' products, weights and biases cast as autocast does it."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(f"p{n}") for n in range(1 + 2 * count))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(8, size, dtype=BF16, device=device)
        for number, weight in enumerate(weights):
            shape = (size,) if number % 2 else (size, size)
            weight.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
    end = graph.output(())
    emit = Emitter(graph, end, x)
    for number in range(count):
        weight, bias = (emit.cast(w, BF16) for w in weights[2 * number : 2 * number + 2])
        if read:
            weight = emit(read, weight)
        x = emit(aten.addmm.default, bias, x, emit(aten.t.default, weight))
    end.args = ((x,),)
    return graph


def grouped(graph):
    found = graph.find_nodes(op="call_function", target=torch.ops.hot.cast_together.default)
    return [len(node.args[0]) for node in found]


def test_casts_of_inputs_are_one_call():
    graph = layers()
    assert casts.cast_together(graph) == 6
    assert grouped(graph) == [6]
    assert not graph.find_nodes(op="call_function", target=casts.CAST)
    graph.lint()


def gradients(read=None, sizes=((8, 16), (1, 17), (2048, 1024))):
    """Products' results cast to fp32 and returned, as a backward does it; ``read`` of the first."""
    graph, results = fx.Graph(), []
    end = graph.output(())
    with FakeTensorMode():
        for number, (rows, columns) in enumerate(sizes):
            with graph.inserting_before(end):
                pair = [graph.placeholder(f"p{number}{side}") for side in "ab"]
            pair[0].meta["val"] = torch.empty(rows, 32, dtype=BF16, device="cuda")
            pair[1].meta["val"] = torch.empty(32, columns, dtype=BF16, device="cuda")
            emit = Emitter(graph, end, pair[0])
            results.append(emit.cast(emit(aten.mm.default, *pair), torch.float32))
    if read:
        results.append(emit(read, results[0]))
    end.args = (tuple(results),)
    return graph


def test_small_results_are_cast_where_the_last_is_made():
    graph = gradients()
    assert casts.cast_together(graph) == 2
    (together,) = graph.find_nodes(op="call_function", target=torch.ops.hot.cast_together.default)
    assert [node.target for node in together.args[0]] == [aten.mm.default] * 2
    assert len(graph.find_nodes(op="call_function", target=casts.CAST)) == 1  # the large one
    graph.lint()


def test_results_that_others_read_stay():
    graph = gradients(aten.neg.default)
    before = str(graph)
    assert casts.cast_together(graph) == 0
    assert str(graph) == before


def test_groups_end_where_they_would_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(casts, "GROUP_BYTES", 2 * (64 * 64 + 64) * 2)
    graph = layers(count=5)
    assert casts.cast_together(graph) == 10
    assert grouped(graph) == [4, 4, 2]
    graph.lint()


@pytest.mark.parametrize(
    "facts",
    [{"device": "cpu"}, {"dtype": BF16}, {"count": 0}, {"count": 1, "read": aten.neg.default}],
    ids=str,
)
def test_what_inductor_casts_at_no_cost_and_what_is_alone_stays(facts):
    graph = layers(**facts)
    before = str(graph)
    assert casts.cast_together(graph) == 0
    assert str(graph) == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_says_what_single_casts_say(device, dtype):
    sizes = [(1,), (17,), (197, 1000), (1, 1), (0, 5), (33, 65)]
    powers = range(9, -9, -3)
    tensors = [torch.randn(s, device=device) * 10.0**p for s, p in zip(sizes, powers, strict=True)]
    tensors[1][:3] = torch.tensor([float("inf"), float("nan"), -1e38])
    for got, tensor in zip(torch.ops.hot.cast_together(tensors, dtype), tensors, strict=True):
        torch.testing.assert_close(got, tensor.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert got.stride() == tensor.stride()


def test_is_defined_as_torch_wants_operators_to_be():
    args = ([torch.randn(3, 4), torch.randn(5)], BF16)
    torch.library.opcheck(torch.ops.hot.cast_together.default, args)


@pytest.mark.parametrize(
    ("kernel", "together"), [((8, 4, 1, 1), True), ((8, 1, 3, 3), True), ((8, 4, 3, 3), False)]
)
def test_kernels_of_convolutions_that_lie_as_they_are_read(kernel, together):
    graph = fx.Graph()
    weights = [graph.placeholder(f"p{n}") for n in range(2)]
    image = graph.placeholder("image")
    with FakeTensorMode():
        for weight in weights:
            weight.meta["val"] = torch.empty(kernel, device="cuda")
        channels = kernel[1] if kernel[1] > 1 else kernel[0]
        image.meta["val"] = torch.empty(2, channels, 8, 8, dtype=BF16, device="cuda")
    end = graph.output(())
    emit, settings = Emitter(graph, end, image), ([1, 1], [1, 1], [1, 1], False, [0, 0])
    groups = channels // kernel[1]
    end.args = (
        tuple(
            emit(aten.convolution.default, image, emit.cast(w, BF16), None, *settings, groups)
            for w in weights
        ),
    )
    assert casts.cast_together(graph) == (2 if together else 0)
    graph.lint()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_counts_of_steps_are_one_call(device):
    graph = fx.Graph()
    counts = [graph.placeholder(f"p{n}") for n in range(4)]
    with FakeTensorMode():
        for count in counts[:3]:
            count.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
        counts[3].meta["val"] = torch.empty((), device=device)  # no whole number
    end = graph.output(())
    emit = Emitter(graph, end, counts[0])
    for count in counts:
        emit(aten.copy_.default, count, emit(aten.add.Tensor, count, 1))
    assert [len(group) for group in casts.count_groups(graph)] == [3] * (device == "cuda")
    assert casts.count_together(graph) == (3 if device == "cuda" else 0)
    graph.lint()
    adds = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert len(adds) == (1 if device == "cuda" else 4)
    values = [torch.tensor(n) for n in range(3)] + [torch.tensor(0.5)]
    fx.GraphModule({}, graph)(*values)
    assert [value.item() for value in values] == [1, 2, 3, 1.5]


def test_a_list_of_fused_kernels_keeps_the_order_of_its_loops():
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode

    assert lowered()
    lists, fused = (object.__new__(c) for c in (ForeachKernelSchedulerNode, FusedSchedulerNode))
    lists.snodes, fused.snodes = [fused], []
    assert lists.reorder_loops_by_dep_pair(None, None) is False


@pytest.mark.gpu
def test_casts_of_kernels_beside_a_loop_in_another_order():
    """An EfficientNet's block in channels last: its backward did not compile on torch 2.11."""
    block = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Conv2d(32, 32, 1), torch.nn.BatchNorm2d(32), torch.nn.SiLU())
          for _ in range(3)),
    ).cuda()  # fmt: skip
    step = torch.compile(block, backend="hot", options={"strict": True})
    with torch.autocast("cuda", BF16):
        step(torch.randn(4, 32, 15, 17, device="cuda")).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
