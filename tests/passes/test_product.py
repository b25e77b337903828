"""The optional 8-bit forward: what it computes, which layers take it, and why."""

import json

import pytest
import torch
from samples_graphs import given
from torch import fx

from hot_compile.config import HotConfig
from hot_compile.observing.collector import Collector
from hot_compile.observing.gauge import Gauge
from hot_compile.observing.monitor import Monitor
from hot_compile.passes.base.graph import returned
from hot_compile.passes.base.site import Site, SiteNodes
from hot_compile.passes.cost.devices import RATES, cuda_rates
from hot_compile.passes.cost.linear import Shape
from hot_compile.passes.forward.product import Form, forward_price, int8_product
from hot_compile.passes.forward.product import _evened as evened
from hot_compile.passes.measure.linear import forward_loss, forward_measures
from hot_compile.passes.measure.observe import (
    Layer,
    Observation,
    observe_gradients,
    unobserved,
)
from hot_compile.passes.plan import plan
from hot_compile.passes.profile.profile import PLAIN, ROTATED, LayerProfile, Measure, Profile
from hot_compile.runtime import reference
from hot_compile.testing import sqnr

VNNI = RATES["cpu-vnni"]


def site(
    lead=(32, 197), gx=True, gw=True, refusal=None, made_by=torch.ops.aten.add.Tensor, **facts
):
    graph = fx.Graph()
    node = graph.call_function(made_by, (graph.placeholder("x"),))
    products = (node if gx else None, node if gw else None)
    rows = lead[0] * (lead[1] if len(lead) > 1 else 1)
    base = {
        "name": "blocks.0.fc1",
        "rows": rows,
        "outputs": 3072,
        "inputs": 768,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "lead": lead,
        "batched": True,
        "head": False,
        "refusal": refusal,
        "nodes": None if refusal else SiteNodes(node, node, False, node, *products, False, node),
    }
    return Site(**{**base, **facts})


def choose(one, device_rates=VNNI, layer=None, **options):
    """The one layer's decision."""
    profile = layer and Profile(8, {one.name: layer})
    config = HotConfig.from_options({"forward": "int8", "lqs": "auto", **options})
    return plan([one], config, {one.device: device_rates}, profile).forwards[0]


def measured(rotated, plain=1.0):
    """A layer whose output was measured this far off, rotated and as it is."""
    forward = {ROTATED: Measure(rotated, 1), PLAIN: Measure(plain, 1)}
    return LayerProfile(3072, 768, 6304, "float32", 2, {}, {}, None, None, forward)


# --- what it computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 15, 17, 197])
@pytest.mark.parametrize(("inputs", "rotated"), [(8, True), (100, True), (384, True), (384, False)])
def test_the_product_is_near_the_truth(dtype, rows, inputs, rotated):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(1000, inputs) / 8, torch.randn(1000)
    x, weight = x.to(dtype), weight.to(dtype)
    got = int8_product(x, weight, torch.ones(rows), bias, Form(rotated), dtype)
    want = x.double() @ weight.double().t() + bias.double()
    assert got.dtype == dtype
    assert sqnr(got, want) > 37
    args = (x, weight.t().contiguous(), torch.ones(rows), bias, Form(rotated, weight_is_io=True))
    flipped = int8_product(*args, dtype)
    assert torch.equal(flipped, got), "W as [I, O] is the same integers"


def test_the_product_is_its_operators_definitions_bit_for_bit():
    torch.manual_seed(0)
    x, weight = torch.randn(197, 100), torch.randn(60, 100)
    ones, bias = torch.ones(197), torch.randn(60)
    pairs = zip((x, weight), evened(x), strict=True)
    rows, outputs = (reference.quantize_rows(t, 8, True, False, False, f) for t, f in pairs)
    args = (rows[0], outputs[0], rows[1], outputs[1], ones, bias, torch.float32)
    want = reference.scaled_int_mm(*args)
    assert torch.equal(int8_product(x, weight, ones, bias, Form(), torch.float32), want)


@pytest.mark.parametrize(("rows", "outputs"), [(0, 16), (16, 0), (0, 0)])
def test_of_nothing_the_product_is_empty(rows, outputs):
    args = (torch.ones(rows, 32), torch.ones(outputs, 32), None, None)
    got = int8_product(*args, Form(), torch.half)
    assert got.shape == (rows, outputs)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(value, rotated):
    x, weight = torch.randn(5, 64), torch.randn(7, 64)
    x[2, 3], weight[4, 1] = value, value
    got = int8_product(x, weight, None, None, Form(rotated), torch.float32)
    assert not got[2].isfinite().any()
    assert not got[:, 4].isfinite().any()
    rest = got[[0, 1, 3, 4]][:, [0, 1, 2, 3, 5, 6]]
    assert rest.isfinite().all()


@pytest.mark.parametrize("channel", [lambda x: x * 100, lambda x: x + 100])
def test_an_outlying_channel_is_spread_over_sixteen(channel):
    torch.manual_seed(0)
    x, weight = torch.randn(512, 384), torch.randn(256, 384)
    x[:, 5] = channel(x[:, 5])
    want = x @ weight.t()
    args = (x, weight, None, None)
    rotated, plain = (int8_product(*args, Form(way), torch.float32) for way in (True, False))
    assert sqnr(rotated, want) > sqnr(plain, want) + 8


def test_large_columns_are_made_smaller_by_half_their_exponent():
    torch.manual_seed(0)
    x = torch.ones(2100, 64)
    x[:, 5:9] = torch.tensor([2.0**-6, 2.0**6, 2.0**12, 2.0**-12])
    less, more = evened(x)
    assert less[4:9].tolist() == [1, 1, 2.0**-3, 2.0**-4, 1], "by 8 octaves at most"
    assert torch.equal(less * more, torch.ones(64))
    assert torch.equal(evened(x[:3])[0], less), "fewer rows than are sampled"
    for alike in (torch.zeros(3, 64), torch.ones(3, 64), torch.randn(2000, 64)):
        assert evened(alike)[0].eq(1).all(), "no outliers: as they are"
    x[2, 5] = float("inf")
    assert evened(x)[0].isfinite().all()


@pytest.mark.parametrize("io", [False, True])
@pytest.mark.parametrize(("row", "won"), [(0, 6), (2e4, 3)])
def test_outlying_columns_as_a_pretrained_models(io, row, won):
    """Three of 576 columns a hundred times the others, W's as they are after a norm with a gain."""
    torch.manual_seed(0)
    x, weight = torch.randn(1024, 576), torch.randn(192, 576)
    x[:, [4, 200, 371]] *= 100
    x[0, 17] += row  # an outlier of one row's own
    weight[:, [4, 200, 371]] /= 10
    want = x.double() @ weight.double().t()
    given = weight.t().contiguous() if io else weight
    forms = (Form(evened=way, weight_is_io=io) for way in (True, False))
    ours, before = (int8_product(x, given, None, None, f, torch.float32) for f in forms)
    assert sqnr(ours[1:], want[1:]) > sqnr(before[1:], want[1:]) + won


# --- which layers


def test_exact_by_default():
    one = site()
    assert plan([one], HotConfig(), {one.device: VNNI}).forwards == ()
    assert HotConfig.from_options({"recipe": "int8-forward"}).forward == "int8"


@pytest.mark.parametrize(
    ("facts", "options", "says"),
    [
        ({"refusal": "no reason"}, {}, "no reason"),
        ({"head": True}, {}, "classifier head"),
        ({"scores": True}, {}, "a softmax reads it"),
        ({"first": True, "gx": False}, {}, "first layer"),
        ({"outputs": 8}, {}, "low-rank factor or head by shape"),
        ({"name": "q.lora_A.default"}, {}, "low-rank factor"),
        ({"lead": (0, 197)}, {}, "empty batch"),
        ({"lead": (4,)}, {}, "it would pay from"),
        ({}, {"exclude": "*.fc1"}, "in exclude"),
        ({}, {"include": "*.fc2"}, "not in include"),
        ({}, {"override": {"*.fc1": "exact"}}, "chosen by override"),
        ({}, {"min_gain": 100}, "no number of rows would change that"),
        ({}, {"rates": {"integer": 1e9}}, "not worth it"),
    ],
)
def test_what_stays_exact_says_why(facts, options, says):
    decision = choose(site(**facts), **options)
    assert not decision.int8
    assert says in decision.reason


def test_the_device_decides():
    assert choose(site()).predicted_gain > 3
    assert not choose(site(), RATES["cpu"]).int8, "without VNNI nothing pays"
    assert choose(site(), "no compiler").reason == "no compiler"


@pytest.mark.parametrize("options", [{"recipe": "exact"}, {"override": {"*": "int8"}}, {}])
def test_the_forward_is_a_decision_of_its_own(options):
    assert choose(site(), **options).int8
    assert choose(site(gw=False), **options).int8, "a frozen weight's, too"


def test_a_measured_output_is_held_to_the_budget():
    assert choose(site(), layer=measured(0.01)).reason == "LQS: output error 0.01"
    over = choose(site(), layer=measured(0.3))
    assert not over.int8
    assert over.reason == "output error 0.3 over budget 0.05"
    assert choose(site(), layer=measured(0.3), forward_budget=0.5).int8
    assert choose(site(), layer=measured(0.3), forward_budget=None).int8


def test_a_layer_is_rotated_unless_that_was_measured_to_buy_nothing():
    rates, as_good = cuda_rates((9, 0), tf32=False), measured(0.010, 0.012)
    assert choose(site(), rates).rotated
    assert choose(site(), rates, measured(0.010, 0.013)).rotated
    plain = choose(site(), rates, as_good)
    assert not plain.rotated
    assert plain.reason == "LQS: output error 0.012"
    assert choose(site(inputs=1000), rates, as_good).rotated, "it wants padding"
    alone = site(made_by=torch.ops.aten.bmm.default)
    assert choose(alone, rates, as_good).rotated, "no kernel to fuse it into"
    assert choose(site(), VNNI, as_good).rotated, "fused kernels compute x twice on a CPU"


def test_what_the_producer_quantises_is_not_read_for_it():
    shape = Shape(25216, 2304, 768, 2)
    rates = cuda_rates((9, 0), tf32=False)
    forms = (Form(), Form(rotated=False), Form(rotated=False, fused=True))
    gains = [forward_price(rates, "bfloat16", shape, form).gain() for form in forms]
    assert gains == sorted(gains)
    assert gains[2] > 1.05 * gains[1]


def test_an_int8_forward_counts_as_another_choice():
    one, prices = site(), {site().device: VNNI}
    exact, ours = (
        plan([one], HotConfig.from_options({"forward": way}), prices) for way in ("exact", "int8")
    )
    assert exact.choice != ours.choice


# --- measured


def test_an_error_is_of_what_varies_over_the_rows():
    torch.manual_seed(0)
    x, weight = torch.randn(256, 128), torch.randn(64, 128)
    usual, offset, constant = (
        {variant: float(error) for variant, (error, _) in forward_measures(t, weight).items()}
        for t in (x, x + 200 * (torch.arange(128) == 5), torch.ones(256, 128))
    )
    assert max(*usual.values(), *constant.values()) < 0.012
    assert offset[ROTATED] > 2 * usual[ROTATED]
    assert offset[PLAIN] > 2 * offset[ROTATED]
    assert forward_measures(x[:, :100], weight[:, :100]).keys() == {ROTATED}


def test_calibration_measures_outputs_and_files_keep_them():
    collector, layer = Collector(8), Layer("fc1", 48, 64, "float32", None)
    for _ in range(2):
        collector(layer, torch.randn(32, 48), torch.randn(48, 64), torch.randn(32, 64))
    collector(
        Layer("frozen", 48, 64, "float32", None), torch.randn(32, 48), None, torch.randn(32, 64)
    )
    collector.flush()
    profile = collector.profile()
    assert 0.001 < profile.layers["fc1"].forward[ROTATED].error < 0.02
    assert profile.layers["frozen"].forward == {}
    data = json.loads(json.dumps(profile.to_json()))
    assert Profile.from_json(data) == profile
    for layer in data["layers"].values():
        del layer["forward"]
    assert Profile.from_json({**data, "version": 2}).layers["fc1"].forward == {}


def test_what_an_8_bit_forward_does_to_the_loss():
    """More rows than a block, so that blocks are put together as they lie."""
    torch.manual_seed(0)
    x, weight, g = torch.randn(8192, 64), torch.randn(48, 64), torch.randn(8192, 48)
    y = int8_product(x, weight, None, None, Form(), torch.float32)
    want = ((y.double() - x.double() @ weight.double().t()) * g).square().sum()
    assert float(forward_loss(g, x, weight, True)) == pytest.approx(float(want), rel=1e-3)
    assert float(forward_loss(3 * g, x, weight, True)) == pytest.approx(9 * float(want), rel=1e-3)


def test_a_monitor_gives_the_graph_an_exact_forward_with_its_first_rung():
    monitor, rungs = Monitor(budget=0.1), []
    options = {"forward": "int8"}
    for n in range(4):
        config = monitor.applied(HotConfig.from_options(options), ["fc1.weight"])
        gauge = Gauge(config=config, weights=["fc1.weight"])
        gauge.layers.add("fc1")
        gauge.gradient("fc1.weight", torch.tensor([1.5]), torch.tensor([1.0]))
        found = gauge.read()
        assert found["fc1"]["weight.grad"].error == 0.5
        if n < 3:
            assert "fc1.weight" in monitor.faults(found, gauge)
            monitor.repair(n, found, {}, gauge)
        config = monitor.applied(HotConfig.from_options(options), ["fc1.weight"])
        rungs.append((config.forward, config.memory_bits, str(config.memory)))
    exact = ("exact", None, "off")
    assert rungs == [("exact", None, "auto"), ("exact", 8, "auto"), exact, exact]
    assert "fc1" in monitor.demoted  # all of the graph is exact: nothing is left to repair
    assert monitor.faults(found, gauge) == {}


def test_a_forward_may_give_none_where_gradients_are_shown():
    """As for logits that nobody wants: a gradient that is shown does not take their place."""
    graph = fx.Graph()
    x, weight, tangent = given(
        graph, dict.fromkeys(("primals_1", "primals_2", "tangents_1"), ((4,), torch.float32))
    )
    loss = graph.call_function(torch.ops.aten.mul.Tensor, (x, weight))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (x, tangent))
    for node in (loss, gradient):
        node.meta["val"] = x.meta["val"]
    graph.output((loss, None, None, gradient))
    observation = Observation(Gauge())
    observe_gradients(graph, [None, "weight"], observation)
    assert returned(graph)[1:] == [None, None, None]
    bare = unobserved(fx.GraphModule({}, graph))
    first, *rest = returned(bare.graph)
    assert first.name == loss.name
    assert rest[0] is None, "the forward's"
    assert [n.name for n in rest if n is not None] == [gradient.name]
