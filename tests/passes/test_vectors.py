"""Vectors of a backward that the forward works out: which, the same numbers, and as one tensor."""

import functools

import pytest
import torch
from samples_graphs import given
from torch import fx, nn

from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.memory import held_bytes
from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, made_of_tangents
from hot_compile.passes.storage import store
from hot_compile.passes.storage.vectors import given_of, in_forward
from hot_compile.record import Reports

MUL = aten.mul.Tensor
VECTORS = dict.fromkeys(("scale", "rstd"), ((1, 16, 1, 1), torch.float32))


@pytest.fixture
def halves():
    """A forward that gives ``scale``, ``rstd`` and ``weight``; a backward that takes them; what is
    given for what; and what appends an operator to the backward."""
    forward, backward = fx.Graph(), fx.Graph()
    (x, weight) = given(forward, {"x": ((8, 16), torch.float32), "weight": ((16,), torch.float32)})
    emit = Emitter(forward, forward.output(None), x)
    scale = emit(aten.view.default, emit(aten.amax.default, x, [0]), [1, 16, 1, 1])
    rstd = emit(aten.rsqrt.default, scale)
    taken = given(
        backward, VECTORS | {"weight": ((16,), torch.float32), "tangents_1": VECTORS["rstd"]}
    )
    emit = Emitter(backward, backward.output(None), taken[0])
    return forward, dict(zip(taken, (scale, rstd, weight), strict=False)), taken, emit


def test_it_is_made_behind_what_it_is_of(halves):
    forward, gives, (scale, rstd, weight, _), emit = halves
    column = emit(aten.view.default, weight, [1, 16, 1, 1])
    vector = emit(MUL, emit(MUL, scale, rstd), column)
    assert given_of(vector, gives) == [scale, rstd, weight]
    made = in_forward(vector, gives)
    forward.output_node().args = ((made,),)
    forward.eliminate_dead_code()
    forward.lint()
    x, w = torch.rand(8, 16), torch.randn(16)
    (got,) = fx.GraphModule({}, forward)(x, w)
    most = x.amax(0).view(1, 16, 1, 1)
    assert torch.equal(got, most * most.rsqrt() * w.view(1, 16, 1, 1))
    assert made.meta["val"].shape == (1, 16, 1, 1)


def test_it_comes_behind_inputs_alone(halves):
    """In front of all else, but behind the last input."""
    forward, gives, (*_, weight, _), emit = halves
    made = in_forward(emit(MUL, weight, 0.5), gives)
    forward.lint()
    assert made.prev.op == "placeholder"


@pytest.mark.parametrize(
    "make",
    [
        lambda emit, scale, rstd, weight, tangents: emit(MUL, scale, tangents),
        lambda emit, scale, rstd, weight, tangents: emit(aten.view.default, weight, [1, 16, 1, 1]),
        lambda emit, scale, rstd, weight, tangents: emit(MUL, scale, emit(aten.exp.default, rstd)),
        lambda emit, scale, rstd, weight, tangents: scale,
    ],
    ids=["of a gradient", "a view", "another operator", "nothing"],
)
def test_others_stay(halves, make):
    _, gives, taken, emit = halves
    vector = make(emit, *taken)
    assert given_of(vector, gives) == []
    assert in_forward(vector, gives) is None


def test_no_image_is_made_twice_for_a_part_of_it(halves):
    _, gives, (scale, rstd, *_), emit = halves
    image = emit(MUL, emit(aten.expand.default, scale, [1, 16, 8, 8]), rstd)
    assert given_of(emit(aten.select.int, image, 3, 0), gives) == []


def step_of(net, x):
    """Its backward's graph, and gradients; what is held is what is reported."""
    graphs, reports = [], Reports()

    def kept(gm, inputs, **kwargs):
        graphs.append(gm.graph)
        return run_uncompiled(gm, inputs, **kwargs)

    net.zero_grad()
    with torch._inductor.config.patch(layout_optimization=False):
        options = {"exclude": "*", "memory_min_bytes": 0}
        own = functools.partial(hot, options=options, inner_compile=kept, recorder=reports)
        torch._dynamo.reset()
        loss = torch.compile(lambda x: net(x).square().mean(), backend=own)(x)
    assert reports.graphs[0].held_bytes == held_bytes(loss, net, x)
    loss.backward()
    return graphs[1], [p.grad for p in net.parameters()]


def of_no_gradient(backward):
    """Vectors that it works out of what the forward saved alone."""
    of_gradients = made_of_tangents(backward)
    made = backward.find_nodes(op="call_function", target=MUL)
    return [n for n in made if n not in of_gradients and n.meta["val"].numel() == 32]


def test_a_batch_norms_factor_is_saved(fresh_dynamo, monkeypatch):
    torch.manual_seed(0)
    layers = (
        layer
        for channels in (8, 32, 32)
        for layer in (nn.Conv2d(channels, 32, 3, bias=False), nn.BatchNorm2d(32), nn.SiLU())
    )
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
    backward, gradients = step_of(net, x)
    fewer = len(of_no_gradient(backward))
    monkeypatch.setattr(store, "in_forward", lambda vector, given: None)
    backward, others = step_of(net, x)
    assert len(of_no_gradient(backward)) - fewer == 2  # the one image that is stored
    for got, want in zip(gradients, others, strict=True):
        assert torch.equal(got, want)
