"""The table of strategies: one function each, run, traced, measured, timed and priced alike."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.emit import Emitter, node_of
from hot_compile.passes.cost import linear as cost
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.layers.strategies import STRATEGIES, Gradients, How, Spec
from hot_compile.passes.measure.linear import grad_weight_measures
from hot_compile.passes.plan import plan
from hot_compile.testing import cosine, hot_step

hot = torch.ops.hot


def rotated(x, how):
    """x transformed along its rows in full, in INT8: what the toy strategy keeps."""
    q, scale = hot.quantize_columns.default(x, 16, 1, 8, True, False)
    return q, scale


def toy(g_y, kept, weight, how):
    """g_w of rows transformed in full; g_x is left exact."""
    q, scale = hot.quantize_columns.default(g_y, 16, 1, 8, True, True)
    x_q, x_scale = kept
    gw = hot.scaled_int_mm.default(q, x_q, scale, x_scale, None, None, how.dtype)
    return Gradients(gw=gw)


@pytest.fixture
def added(monkeypatch):
    """A name and an entry of the table: all that a strategy takes besides its function."""
    name = str.__new__(Strategy, "toy")  # as a line in the enumeration would make it
    name._name_, name._value_ = "TOY", "toy"
    monkeypatch.setitem(Strategy._value2member_map_, "toy", name)
    monkeypatch.setitem(STRATEGIES, name, Spec(toy, rotated, quantises_x=True))
    return name


def operands(rows=64, outputs=48, inputs=32):
    torch.manual_seed(0)
    sizes = ((rows, outputs), (rows, inputs), (outputs, inputs))
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("recompute", [True, False])
def test_an_added_strategy_is_what_a_graph_computes(added, recompute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    x = torch.randn(64, 32)
    model(x).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = {"override": {"*": "toy"}, "recompute": recompute, "memory": "off"}
    _, (graph,) = hot_step(lambda x: model(x).square().mean(), x, options=options)
    assert {d.strategy for d in graph.plan} == {added}
    got = [p.grad for p in model.parameters()]
    assert all(cosine(a, b) > 0.999 for a, b in zip(got, exact, strict=True))
    assert not torch.equal(got[0], exact[0])
    packed = [c for c in graph.crossing if c.packed]
    assert bool(packed) is not recompute


def test_it_is_measured_by_calibration(added):
    g, x, _ = operands()
    error, similarity = grad_weight_measures(g, x, 8, None)["toy"]
    assert 0 < error < 0.02
    assert similarity > 0.999


def test_it_is_priced_by_its_operators(added):
    how = How()
    price = cost.layer_cost(added, how)
    shape = cost.Shape(1024, 256, 128, 4)
    assert cost.at(price.flops, shape) == cost.at(price.int_ops, shape) == 2 * 1024 * 256 * 128
    assert price.calls == 4  # g_y, x, and a product each
    slow, fast = (
        cost.layer_price(added, how, RATES["cpu-vnni"], "float32", cost.Shape(*sizes, 4)).gain()
        for sizes in ((8, 8, 8), (2**15, 2048, 2048))
    )
    assert slow < 1 < fast < 2


def test_it_is_timed_by_the_benchmark(added, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    layers = importlib.import_module("layers")
    g, x, weight = operands()
    layers.backward(added, g, weight, x, How(one_read=True))


def every_how():
    for io in (True, False):
        yield How(weight_is_io=io, grad_weight_is_io=io)
        yield How(gx=False, grad_weight_is_io=io)
        yield How(gw=False, weight_is_io=io)
    yield How(rank=8, tokens=4)
    yield How(one_read=True)
    yield How(one_read=True, fused=True)
    yield How(gx_bits=4, packed=True)
    yield How(per_row=False, per_channel=False)


@pytest.mark.parametrize("how", [*every_how()], ids=lambda how: "")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_nodes_compute_what_the_function_computes_and_all_of_it_has_a_price(strategy, how):
    """The same function on tensors, on a graph's nodes and on sizes."""
    g, x, weight = operands()
    weight = weight.t().contiguous() if how.weight_is_io else weight
    spec = STRATEGIES[strategy]
    how = dataclasses.replace(how, rank=8) if spec.low_rank else how
    want = spec(g, x, weight, how)
    graph, mode = fx.Graph(), torch._subclasses.fake_tensor.FakeTensorMode()
    places = [graph.placeholder(name) for name in "gxw"]
    for node, tensor in zip(places, (g, x, weight), strict=True):
        node.meta["val"] = mode.from_tensor(tensor)
    end = graph.output(None)
    got = spec(*map(Emitter(graph, end, places[0]).traced, places), how)
    results = [node_of(r) if r is not None else None for r in got]
    end.args = (tuple(results),)
    computed = fx.GraphModule({}, graph)(g, x, weight)
    for node, mine, theirs in zip(results, computed, want, strict=True):
        assert (mine is None) is (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert node.meta["val"].shape == theirs.shape
    price = cost.layer_cost(strategy, how)
    assert cost.at(cost.seconds(price, RATES["sm90"], "float32"), cost.Shape(64, 48, 32, 4)) > 0


def test_planning_reads_nothing_but_its_arguments(monkeypatch):
    """No runtime is built or looked for: prices come in as data."""
    from hot_compile.passes.cost import devices

    def fail(*args):
        raise AssertionError("plan looked for a runtime")

    monkeypatch.setattr(devices, "pricing", fail)
    monkeypatch.setattr(devices, "load", fail)
    assert plan([], HotConfig(), {}).decisions == ()
