"""What is worked out in the pieces in which its operand is packed is what it was."""

import pytest
import torch
from samples_graphs import given
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage.pieces import (
    SIDE_BY_SIDE,
    in_groups,
    join_part_by_part,
    restore_once_where_read_apart,
    work_out_in_pieces,
)
from hot_compile.runtime import pieces

aten = torch.ops.aten
WIDTH = 96
DECOMPOSED = torch._decomp.get_decompositions([aten.gelu, aten.silu, aten.relu, aten._to_copy])


def activated(function):
    """A layer, ``function`` of what it gives, and another layer."""
    return lambda x, w, v: (function((x @ w).view(4, -1, WIDTH)).view(-1, WIDTH) @ v,)


def gated(x, w, v):
    return ((F.silu(x @ w) * (x @ w.t())) @ v,)


def two_of(a, v):
    return F.gelu(a) @ v, F.silu(a) @ v


RESULTS = {
    "gelu": activated(F.gelu),
    "gelu by tanh": activated(lambda a: F.gelu(a, approximate="tanh")),
    "squared relu": activated(lambda a: F.relu(a).square()),
    "bf16": lambda x, w, v: (F.gelu(x.bfloat16() @ w.bfloat16()) @ v.bfloat16(),),
    "gate and branch": gated,
    "two of one": lambda x, w, v: two_of(x @ w, v),
}
LEFT = {
    "another tensor": lambda x, w, v: ((F.gelu(x @ w) + x) @ v,),
    "read by a kernel": lambda x, w, v: (F.gelu(x @ w).sum(),),
    "returned": lambda x, w, v: (F.gelu(x @ w),),
    "made by a kernel": lambda x, w, v: (F.gelu(x.sin()) @ v,),
    "transposed": lambda x, w, v: (F.gelu((x @ w).t()) @ x,),
}


def traced(function):
    torch.manual_seed(0)
    inputs = torch.randn(64, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    graph = make_fx(function, DECOMPOSED, tracing_mode="fake")(*inputs)
    return graph, inputs


@pytest.mark.parametrize("scheme", [*filter(in_groups, Scheme)])
@pytest.mark.parametrize("name", RESULTS)
def test_what_libraries_read_is_the_same_in_pieces(name, scheme):
    module, inputs = traced(RESULTS[name])
    expected = module(*inputs)
    stored = [n for n in module.graph.nodes if n.target is aten.mm.default][: -len(expected)]
    stored = {node: scheme for node in stored if node.users}
    assert work_out_in_pieces(module.graph, stored) >= 1
    module.graph.lint()
    module.recompile()
    cut = module.graph.find_nodes(op="call_function", target=SIDE_BY_SIDE)
    assert all(len(node.args[0]) == scheme.spec.pieces for node in cut)
    assert bool(cut) == (scheme.spec.pieces > 1)
    for got, want in zip(module(*inputs), expected, strict=True):
        # a CPU works out the ends of a loop, which lie elsewhere in pieces, by other functions
        torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 1e-6)


@pytest.mark.parametrize("name", LEFT)
def test_what_other_kernels_make_or_read_stays(name):
    module, _ = traced(LEFT[name])
    before = str(module.graph)
    first = next(n for n in module.graph.nodes if n.target in (aten.mm.default, aten.sin.default))
    assert work_out_in_pieces(module.graph, {first: Scheme.GROUPS6}) == 0
    assert str(module.graph) == before


def test_other_schemes_have_no_pieces():
    module, _ = traced(RESULTS["gelu"])
    first = next(n for n in module.graph.nodes if n.target is aten.mm.default)
    assert work_out_in_pieces(module.graph, {first: Scheme.ROWS8}) == 0


def test_inductor_puts_them_side_by_side():
    def step(x):
        view = x.view(-1, 4, 8)
        parts = [F.gelu(view[:, n : n + 1]) for n in range(4)]
        return torch.ops.hot.side_by_side(parts, -2).view(x.shape)

    assert pieces.lowered()
    x = torch.randn(16, 32)
    torch.testing.assert_close(torch.compile(step)(x), F.gelu(x))


def test_the_operator_keeps_its_contract():
    torch.library.opcheck(SIDE_BY_SIDE, ([torch.randn(3, 2), torch.randn(3, 4)], 1))


def planes_and_gradient(device):
    """(a graph, its nodes for planes of [16, 128] numbers, and for a gradient)."""
    graph = fx.Graph()
    tensors = {
        "upper": ((16, 32, 1), torch.int16), "lower": ((16, 32, 1), torch.uint8),
        "scale": ((16, 1, 1), torch.bfloat16), "gradient": ((8, 128), torch.float32),
    }  # fmt: skip
    *planes, gradient = given(graph, tensors, device)
    return graph, planes, gradient


def drawn_planes(draw):
    """What these hold: any bits."""
    return [
        torch.randint(-(2**15), 2**15, (16, 32, 1), generator=draw).to(torch.int16),
        torch.randint(0, 256, (16, 32, 1), generator=draw).to(torch.uint8),
        torch.rand(16, 1, 1, generator=draw).bfloat16(),
    ]


def glu_gradient(device="cuda", dtype=torch.float32, restored=True, twice=False, multiplied=False):
    """The gradient of ``x, gate = y.chunk(2, -1)``, of which y is restored."""
    graph, planes, gradient = planes_and_gradient(device)
    end = graph.output(())
    emit = Emitter(graph, end, gradient)
    y = emit(torch.ops.hot.restored_planes.default, *planes, 4, 30, True) if restored else None
    y = emit(aten.view.default, y if restored else emit(aten.cat.default, [gradient] * 2), [8, 256])
    x, gate = (emit(aten.slice.Tensor, y, 1, at, at + 128) for at in (0, 128))
    first = emit(aten.mul.Tensor, gradient, gate)
    second = first if twice else emit(aten.mul.Tensor, emit(aten.sin.default, gradient), x)
    joined = emit(aten.cat.default, [first, emit.cast(second, dtype)], 1)
    weight = emit(aten.t.default, joined)
    end.args = ((emit(aten.mm.default, joined, weight) if multiplied else joined,),)
    return graph


def test_a_glus_gradient_is_written_half_by_half():
    """As one loop over both, it would restore for each element what either half needs."""
    graph = glu_gradient()
    assert join_part_by_part(graph) == 1
    graph.lint()
    (joined,) = graph.find_nodes(op="call_function", target=SIDE_BY_SIDE)
    assert [part.target for part in joined.args[0]] == [aten.mul.Tensor] * 2
    assert joined.args[1] == 1
    assert joined.meta["val"].shape == (8, 256)


def test_so_is_one_of_what_is_not_restored_where_a_product_reads_it():
    """Then nothing is made in the kernel that reads it, and the halves are made of the same."""
    assert join_part_by_part(glu_gradient(restored=False, multiplied=True)) == 1


@pytest.mark.parametrize(
    "how",
    [{"device": "cpu"}, {"dtype": torch.bfloat16}, {"restored": False}, {"twice": True}],
    ids=str,
)
def test_other_joins_stay_as_they_are(how):
    graph = glu_gradient(**how)
    before = str(graph)
    assert join_part_by_part(graph) == 0
    assert str(graph) == before


def spread(device, read):
    """``read`` of restored numbers [16, 1, 128] in bf16."""
    graph, planes, gradient = planes_and_gradient(device)
    end = graph.output(())
    emit = Emitter(graph, end, gradient)
    x = emit(torch.ops.hot.restored_planes.default, *planes, 4, 30, True)
    x = emit(aten.view.default, x, [16, 1, 128])
    end.args = ((read(emit, emit.cast(x, torch.bfloat16)),),)
    return graph


def broadcast(count):
    return lambda emit, x: emit(aten.add.Tensor, x, emit(aten.full.default, [count, 1], 1.0, **ON))


def put_into(emit, x):
    whole = emit(aten.full.default, [16, 8, 128], 0.0, **ON)
    half = emit(aten.mul.Tensor, emit(aten.select.int, x, 1, 0), 0.5)
    return emit(aten.select_scatter.default, whole, half, 1, 3)


ON = {"device": torch.device("cuda"), "dtype": torch.float32}


@pytest.mark.parametrize(
    "read",
    [broadcast(4), put_into, lambda emit, x: emit(aten.expand.default, x, [16, 9, 128])],
    ids=["broadcast", "put into a whole", "expanded"],
)
def test_what_is_read_several_times_is_restored_once(read):
    graph = spread("cuda", read)
    (cast,) = graph.find_nodes(
        op="call_function", target=torch.ops.prims.convert_element_type.default
    )
    assert restore_once_where_read_apart(graph) == 1
    graph.lint()
    (memory,) = cast.users  # in bf16
    assert memory.target is aten.as_strided.default
    assert memory.args == (cast, [16, 1, 128], [128, 128, 1])


def turned(order=(1, 0), beside=True, size=(16, 120)):
    """``read`` a part of it transposed, beside what is not."""

    def read(emit, x):
        x = emit(aten.view.default, x, [16, 128])
        x = emit(aten.add.Tensor, emit(aten.slice.Tensor, x, 1, 0, 120), 1.0)
        across = emit(aten.permute.default, emit(aten.view.default, x, list(size)), list(order))
        level = emit(aten.view.default, x, list(across.meta["val"].shape))
        return emit(aten.mul.Tensor, across, level if beside else across)

    return read


@pytest.mark.parametrize("size", [(16, 120), (2, 8, 120)], ids=str)
def test_what_is_read_in_another_order_is_restored_in_its_own(size):
    order = [*range(len(size) - 2), len(size) - 1, len(size) - 2]
    graph = spread("cuda", turned(order, size=size))
    planes = drawn_planes(torch.Generator().manual_seed(0))
    (expected,) = fx.GraphModule({}, graph)(*planes, None)
    assert restore_once_where_read_apart(graph) == 1
    graph.lint()
    (found,) = fx.GraphModule({}, graph)(*planes, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_read_once_or_by_a_library_is_restored_where_it_is_read():
    def product(emit, x):
        x = emit(aten.view.default, x, [16, 128])
        return emit(aten.mm.default, emit(aten.permute.default, x, [1, 0]), x)

    # with all in one order, rows that move as a whole, and images, whose order is not known
    level = turned(beside=False), turned((1, 0, 2), size=(2, 8, 120))
    image = turned((0, 2, 3, 1), size=(2, 8, 12, 10))
    for read in (broadcast(3), product, *level, image):
        assert restore_once_where_read_apart(spread("cuda", read)) == 0
