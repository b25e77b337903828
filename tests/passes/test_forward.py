"""The optional 8-bit forward: which layers take it and why, what it computes, what it leaves."""

import json
import warnings
from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.errors import OptionWarning
from hot_compile.inspect import Explanation, run_uncompiled
from hot_compile.observing.collector import Collector
from hot_compile.observing.monitor import Monitor, Quality
from hot_compile.page import page_data
from hot_compile.passes.cost.devices import RATES, cuda_rates
from hot_compile.passes.cost.linear import Shape
from hot_compile.passes.forward import rewrite as rewriting
from hot_compile.passes.forward.product import Form, Price, int8_product
from hot_compile.passes.layers.plan import Plan, plan
from hot_compile.passes.measure.linear import forward_measures
from hot_compile.passes.measure.observe import Layer
from hot_compile.passes.measure.profile import PLAIN, ROTATED, LayerProfile, Measure, Profile
from hot_compile.passes.site import Site, SiteNodes
from hot_compile.runtime import reference
from hot_compile.testing import hot_step, sqnr

ALWAYS = {"forward": "int8", "min_gain": 0, "keep_head": False, "memory_min_bytes": 0}
EXACT_BACKWARD = {**ALWAYS, "recipe": "exact", "memory": "off"}
VNNI = RATES["cpu-vnni"]
QUANTISE, PRODUCT = "hot.quantize_rows.default", "hot.scaled_int_mm.default"


class Block(nn.Module):
    """A norm and a MLP around a residual: nothing reads the input but the norm."""

    def __init__(self, width=64, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width, bias=bias)
        self.fc2 = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


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
    return LayerProfile(3072, 768, 6304, "float32", 2, {}, {}, None, None, {}, forward)


def step(model, *inputs, autocast=None, **keywords):
    """(output, gradients, reports) of one training step."""
    found = []

    def loss(*inputs):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            found[:] = [model(*inputs)]
        return found[0].float().square().mean()

    model.zero_grad()
    torch.manual_seed(0)
    _, reports = hot_step(loss, *inputs, **keywords)
    return found[0].detach(), [p.grad.clone() for p in model.parameters()], reports


def calls(reports, target, stage="forward"):
    """How many nodes of the stage's graphs call an operator."""
    return sum(node.target == target for r in reports for node in r.stages[stage].nodes)


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
    rows, outputs = (reference.quantize_rows(t, 8, True, False) for t in (x, weight))
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
    gains = [Price(rates, "bfloat16", shape, form).gain() for form in forms]
    assert gains == sorted(gains)
    assert gains[2] > 1.05 * gains[1]


def test_a_plan_goes_through_json_and_counts_as_another_choice():
    one, prices = site(), {site().device: VNNI}
    exact, ours = (
        plan([one], HotConfig.from_options({"forward": way}), prices) for way in ("exact", "int8")
    )
    assert Plan.from_json(json.loads(json.dumps(ours.to_json()))) == ours
    old = {key: value for key, value in exact.to_json().items() if key != "forwards"}
    assert Plan.from_json(old) == exact
    assert exact.choice != ours.choice


# --- in a graph


def test_gradients_pass_straight_through():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(33, 64, requires_grad=True)
    y, (g_w, g_b), reports = step(layer, x, options=EXACT_BACKWARD)
    assert calls(reports, PRODUCT) == 1
    want = int8_product(
        x.detach(), layer.weight.detach(), torch.ones(33), layer.bias.detach(), Form(), y.dtype
    )
    assert torch.equal(y, want), "the bias is added in the epilogue"
    g_y = 2 * y / y.numel()
    torch.testing.assert_close(g_w, g_y.t() @ x.detach())
    torch.testing.assert_close(g_b, g_y.sum(0))
    torch.testing.assert_close(x.grad, g_y @ layer.weight.detach())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_trains_nearly_as_exact_and_holds_no_more(autocast, bias, lower):
    torch.manual_seed(0)
    model, x = Block(bias=bias), torch.randn(16, 17, 64)
    args = {"autocast": autocast, "lower": lower}
    y, gradients, reports = step(model, x, options=ALWAYS, **args)
    default = step(model, x, options={**ALWAYS, "forward": "exact"}, **args)
    assert calls(reports, PRODUCT) == 2
    assert calls(default[2], PRODUCT) == 0
    assert reports[0].held_bytes == default[2][0].held_bytes
    assert sqnr(y, default[0]) > 38
    for mine, theirs in zip(gradients, default[1], strict=True):
        assert sqnr(mine, theirs) > 25


@pytest.mark.slow
def test_lowered_it_is_the_same():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 3, 64)
    (y, *_), (lowered, *_) = (step(model, x, options=ALWAYS, lower=low) for low in (False, True))
    torch.testing.assert_close(lowered, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operands_that_need_no_rotation_are_left_to_inductor(lower, monkeypatch):
    monkeypatch.setattr(rewriting, "Form", lambda rotated, weight_is_io: Form(False, weight_is_io))
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 17, 64)
    y, gradients, reports = step(model, x, options=ALWAYS, lower=lower)
    assert calls(reports, PRODUCT) == 2
    assert calls(reports, QUANTISE) == 0
    assert sqnr(y, model(x).detach()) > 38
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("recipe", ["int8", "fast", "paper", "luq"])
def test_it_goes_with_every_recipe(recipe):
    model, x = Block(), torch.randn(16, 17, 64)
    *_, gradients, reports = step(model, x, options={**ALWAYS, "recipe": recipe, "lqs": "off"})
    assert [forward.way for forward in reports[0].plan.forwards] == ["int8", "int8"]
    assert all(g.isfinite().all() for g in gradients)


class Shared(nn.Module):
    """q, k and v of one x, as separate layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([part(x) for part in self.parts])


def test_what_several_layers_read_is_quantised_once():
    *_, reports = step(Shared(), torch.randn(32, 64), options=ALWAYS)
    assert calls(reports, PRODUCT) == 3
    assert calls(reports, QUANTISE) == 4, "x, and three weights"
    assert calls(reports, "aten.full.default") == 1


class Added(nn.Module):
    """addmm of a matrix, and W as [I, O]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return torch.addmm(x, self.norm(x), self.weight)


def test_any_addend_and_layout_is_taken():
    model, x = Added(), torch.randn(32, 64)
    y, (*_, g_w), reports = step(model, x, options=EXACT_BACKWARD)
    assert calls(reports, PRODUCT) == 1
    assert sqnr(y, model(x).detach()) > 40
    assert g_w.isfinite().all()


def test_dynamic_rows():
    model = Block()
    options = {**ALWAYS, "recipe": "exact"}
    run = torch.compile(
        model, dynamic=True, backend=partial(hot, options=options, inner_compile=run_uncompiled)
    )
    for rows in (40, 33, 17):
        x = torch.randn(rows, 64)
        y = run(x)
        y.sum().backward()
        assert 38 < sqnr(y.detach(), model(x).detach()) < 80


def test_without_a_backward_nothing_changes():
    model, x = Block(), torch.randn(32, 64)
    run = torch.compile(model, backend=partial(hot, options=ALWAYS, inner_compile=run_uncompiled))
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    model.requires_grad_(False)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("recipe", ["hot", "exact"])
def test_a_checkpointed_region_is_computed_again_as_it_was(recipe):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(32, 8, 64, requires_grad=True)
    options = {**ALWAYS, "recipe": recipe, "memory": "off"}

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = model

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    y, gradients, reports = step(Checkpointed(), x, options=options)
    plain = step(model, x, options=options)
    assert torch.equal(y, plain[0])
    assert calls(reports, PRODUCT) == 2
    again = calls(reports, PRODUCT, "backward") - calls(plain[2], PRODUCT, "backward")
    *_, exact = step(Checkpointed(), x, options={**options, "forward": "exact"})
    assert again == calls(exact, "aten.addmm.default", "backward") > 0
    assert reports[0].held_bytes < plain[2][0].held_bytes
    for mine, theirs in zip(gradients, plain[1], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_first_layer_stays_exact_but_not_one_that_reads_activations():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)
    *_, reports = step(model, x, options=ALWAYS)
    assert [f.int8 for f in reports[0].plan.forwards] == [False, True]
    *_, reports = step(model, x.requires_grad_(), options=ALWAYS)
    assert [f.int8 for f in reports[0].plan.forwards] == [True, True], "as in a block of a model"


@pytest.mark.parametrize("scores", [F.cross_entropy, lambda x, y: x.softmax(1).square().mean()])
def test_heads_and_routers_stay_exact_wherever_the_loss_is(scores):
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(64, 96)

        def forward(self, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return scores(self.head(self.block(x)).flatten(0, 1), y)

    model, y = Scored(), torch.randint(0, 96, (32,))
    for keep_head, ways in ((True, ["int8", "int8", "exact"]), (False, ["int8"] * 3)):
        options = {**ALWAYS, "keep_head": keep_head}
        *_, reports = step(model, torch.randn(4, 8, 64), y, options=options)
        assert [forward.way for forward in reports[0].plan.forwards] == ways


def test_patches_of_an_image_are_an_input():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(48, 64)

        def forward(self, x):
            x = x.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5)
            return self.layer(x.reshape(x.shape[0], 16, 48))

    *_, reports = step(Patches(), torch.randn(8, 3, 16, 16), options=ALWAYS)
    assert "first layer" in reports[0].plan.forwards[0].reason


def test_a_layer_that_cannot_be_built_stays_exact(monkeypatch):
    build = rewriting.int8_product

    def fails(x, weight, *args):
        if weight.shape[0] == 128:
            raise RuntimeError("no")
        return build(x, weight, *args)

    monkeypatch.setattr(rewriting, "int8_product", fails)
    model, x = Block(), torch.randn(32, 64)
    y, gradients, reports = step(model, x, options=ALWAYS)
    first, second = reports[0].plan.forwards
    assert first.reason == "could not be rewritten: RuntimeError: no"
    assert (first.int8, second.int8) == (False, True)
    assert calls(reports, PRODUCT) == 1
    assert sqnr(y, model(x).detach()) > 40
    assert all(g.isfinite().all() for g in gradients)


def test_an_option_without_effect_is_told():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(32, 64)
    with pytest.warns(
        OptionWarning, match="forward='int8' changes nothing .*'0', '2': first layer"
    ):
        step(model, x, options={"forward": "int8"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", OptionWarning)
        step(Block(), x, options=ALWAYS)


def test_explain_shows_each_layer_and_why():
    *_, reports = step(Block(), torch.randn(32, 64), options=ALWAYS | {"exclude": "fc2"})
    text = str(Explanation(tuple(reports)))
    assert "forward: 1 of 2 products on INT8" in text
    assert "in exclude=['fc2']" in text
    assert [row["way"] for row in page_data(reports)["forwards"]] == ["int8", "exact"]
    *_, reports = step(Block(), torch.randn(32, 64), options=ALWAYS | {"forward": "exact"})
    assert "forward:" not in str(Explanation(tuple(reports)))


# --- measured


def test_an_error_is_of_what_varies_over_the_rows():
    torch.manual_seed(0)
    x, weight = torch.randn(256, 128), torch.randn(64, 128)
    usual, offset, constant = (
        {variant: float(error) for variant, (error, _) in forward_measures(t, weight).items()}
        for t in (x, x + 50 * (torch.arange(128) == 5), torch.ones(256, 128))
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


def test_a_monitor_tries_an_exact_forward_first():
    config = HotConfig.from_options({"forward": "int8"})
    monitor = Monitor(budget=0.1)
    found = {"fc1": {"weight.grad": Quality(0.5, 0.9)}}
    rungs = []
    for n in range(4):
        assert monitor.tell(n, found, config)
        config = monitor.applied(HotConfig.from_options({"forward": "int8"}), ["fc1.weight"])
        rungs.append((config.forward, config.memory_bits, str(config.memory)))
    assert rungs[:3] == [("exact", 6, "all"), ("exact", 8, "all"), ("exact", 6, "off")]
    assert "*" in monitor.demoted
