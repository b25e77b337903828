"""Inputs of layers that a backward keeps, where making them again takes too long."""

import dataclasses

import pytest
import torch
from samples_storage import ALL, crossing
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, placeholders, returned
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.storage.kept_inputs import keep_inputs, made_again
from hot_compile.testing import hot_step

RATE, ROWS = RATES["sm90"], 64


def halves(*widths):
    """A forward and a backward of products, each of a square that either makes."""
    forward, backward, saved = fx.Graph(), fx.Graph(), []
    with torch._subclasses.fake_tensor.FakeTensorMode():
        for place, width in enumerate(widths):
            value = torch.empty(ROWS, width, device="cuda")
            x, g = forward.placeholder(f"primals_{place}"), f"tangents_{place}"
            x.meta["val"] = value
            saved.append((value, g))
    end, back = forward.output(()), backward.output(())
    kept, results, gradients = [], [], []
    for place, (value, g) in enumerate(saved):
        x = placeholders(forward)[place]
        emit = Emitter(forward, end, x)
        half = emit(aten.mul.Tensor, x, 0.5)
        squared = emit(aten.mul.Tensor, half, half)
        half.name, squared.name = f"half_{place}", f"squared_{place}"
        kept.append(half)
        results.append(emit(aten.mm.default, emit(aten.t.default, squared), squared))
        with backward.inserting_before(back):
            arriving, tangent = backward.placeholder(half.name), backward.placeholder(g)
        arriving.meta["val"], tangent.meta["val"] = value, results[-1].meta["val"]
        emit = Emitter(backward, back, arriving)
        again = emit(aten.mul.Tensor, arriving, arriving)
        again.name = squared.name
        gradients.append(emit(aten.mm.default, again, tangent))
    end.args, back.args = ((*results, *kept),), (tuple(gradients),)
    return forward, backward, len(results)


def kept(most, *widths, change=lambda *_: None):
    """(names of what crosses, how many are new, seconds left)."""
    forward, backward, count = halves(*widths)
    change(forward, backward)
    done, left = keep_inputs(forward, backward, count, lambda _: RATE, most)
    names = [node.name for node in returned(forward)[count:]]
    assert names == [n.name for n in placeholders(backward) if "tangents" not in n.name]
    return names, done, left


def seconds(width):
    return ROWS * width * 4 / RATE.copy


def test_the_largest_are_kept_until_the_rest_fits():
    every = seconds(8) + seconds(32) + seconds(16)
    assert kept(2 * every, 8, 32, 16) == (["half_0", "half_1", "half_2"], 0, pytest.approx(every))
    names, done, left = kept(seconds(25), 8, 32, 16)
    assert sorted(names) == ["half_0", "half_2", "squared_1"]
    assert done == 1
    assert left == pytest.approx(seconds(24))
    names, done, left = kept(0.0, 8, 32, 16)
    assert sorted(names) == ["squared_0", "squared_1", "squared_2"]
    assert (done, left) == (3, 0.0)


def test_what_a_user_has_made_again_is_left_so():
    def checkpointed(forward, _):
        for node in forward.nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    assert kept(0.0, 8, change=checkpointed) == (["half_0"], 0, 0)


def test_what_a_user_gets_is_not_handed_out_twice():
    def shown(forward, _):
        squared = next(node for node in forward.nodes if node.name == "squared_0")
        forward.output_node().args = ((squared, *returned(forward)[1:]),)

    assert kept(0.0, 8, change=shown) == (["half_0"], 0, 0)


def test_where_nothing_is_known_of_times_nothing_is_kept():
    forward, backward, count = halves(8)
    assert [n.name for n in made_again(backward)] == ["squared_0"]
    assert keep_inputs(forward, backward, count, lambda _: None, 0.0) == (0, 0.0)


def test_gradients_are_the_same(monkeypatch):
    """Of a step whose layers' inputs are kept, to what storing them rounds."""
    from hot_compile.passes import pipeline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(96, 64)

    def loss(x):
        return F.layer_norm(model(x), (64,)).square().mean()

    def found(most):
        def inputs(cut):
            given = *cut.graphs, cut.num_fwd_outputs, cut.context.rates
            return keep_inputs(*given, most)[0]

        steps = [
            dataclasses.replace(step, run=inputs) if step.name == "inputs" else step
            for step in pipeline.PARTITIONED
        ]
        monkeypatch.setattr("hot_compile.passes.hooks.PARTITIONED", tuple(steps))
        model.zero_grad()
        options = {**ALL, "memory": "all", "memory_bits": 8, "accept": "off"}
        stored = sum(c.bytes_before for c in crossing(loss, x))
        model.zero_grad()
        hot_step(loss, x, options=options)
        return stored, [p.grad.clone() for p in model.parameters()]

    (least, again), (more, once) = found(1.0), found(0.0)
    assert more > least
    for a, b in zip(again, once, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
