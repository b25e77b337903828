"""Convolutions in the 8-bit forward: what is computed, which take it, and what graphs become."""

import dataclasses
import math
import re
from functools import partial

import pytest
import torch
from samples_forward import ALWAYS, EXACT_BACKWARD, PRODUCT, QUANTISE, Checkpointed, calls, step
from torch import fx, nn
from torch.nn import functional as F

from hot_compile import calibrate
from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.inspect import Explanation, run_uncompiled
from hot_compile.passes.base.site import ConvNodes, Convolution, Site
from hot_compile.passes.cost.conv import NO_CONVOLUTIONS
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.forward.convolution import folds, int8_convolution
from hot_compile.passes.forward.product import Form, int8_product
from hot_compile.passes.measure.conv import conv_forward_measures
from hot_compile.passes.plan import plan
from hot_compile.passes.profile.profile import ROTATED, LayerProfile, Measure, Profile
from hot_compile.testing import sqnr

VNNI = RATES["cpu-vnni"]
ADDED_UP = "hot.conv_grad_input.default"
FLOOR = 37
"""dB, as of a linear layer's product."""


def geometry(module, x, y):
    """Of ``module``, which makes y of x."""
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    small, big = (x, y) if transposed else (y, x)
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    last = x.stride(1) == 1
    sizes = tuple(small.shape[2:]), tuple(big.shape[2:]), big.shape[1]
    return Convolution(x.shape[0], *sizes, *settings, transposed, last)


def quantised(module, x):
    """The module's result with an 8-bit forward."""
    like = module(x).detach()
    bias = None if module.bias is None else module.bias.detach()
    args = (x, module.weight.detach(), bias, lambda rows: torch.ones(len(rows)))
    return int8_convolution(*args, geometry(module, x, like), like), like


# --- what it computes

MODULES = [
    (lambda: nn.Conv2d(24, 40, 1), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, 1, 2), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, 3, padding=1), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(17, 5, 3), (3, 17, 9, 7)),
    (lambda: nn.Conv2d(20, 24, 3, 2, 1, bias=False), (3, 20, 9, 7)),
    (lambda: nn.Conv2d(8, 24, 2, 2), (3, 8, 9, 7)),
    (lambda: nn.Conv2d(24, 40, (3, 1), (1, 2), (1, 0)), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, (1, 5), padding=(0, 1)), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, 3, padding=2, dilation=2), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, 3, padding=3), (3, 24, 9, 7)),
    (lambda: nn.Conv2d(24, 40, 3, padding=1), (1, 24, 1, 1)),
    (lambda: nn.Conv1d(24, 5, 5, padding=2), (2, 24, 31)),
    (lambda: nn.Conv3d(24, 16, 3, padding=1, bias=False), (2, 24, 5, 6, 7)),
    (lambda: nn.ConvTranspose2d(24, 16, 2, 2), (2, 24, 5, 6)),
    (lambda: nn.ConvTranspose2d(24, 16, 3, 2, 1, output_padding=1), (2, 24, 5, 6)),
    (lambda: nn.ConvTranspose2d(24, 16, 1), (2, 24, 5, 6)),
    (lambda: nn.ConvTranspose1d(24, 16, 3, dilation=2), (2, 24, 9)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("make", "shape"), MODULES)
def test_the_result_is_near_the_truth(make, shape, last, dtype):
    torch.manual_seed(0)
    module, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    if last and x.dim() == 4:
        module, x = (t.to(memory_format=torch.channels_last) for t in (module, x))
    got, like = quantised(module, x)
    assert (got.shape, got.stride(), got.dtype) == (like.shape, like.stride(), dtype)
    assert sqnr(got, module.double()(x.double()).detach()) > FLOOR


def test_which_are_added_up():
    """What is not reads an unfolded x; a padding wider than the kernel is such a case."""
    folded = [make() for make, _ in MODULES]
    folded = [
        folds(geometry(m, x, m(x)))
        for m, x in zip(folded, (torch.randn(s) for _, s in MODULES))  # noqa: B905
    ]
    assert folded == [n in (2, 3, 7, 8, 10, 11, 12, 13, 14, 16) for n in range(len(MODULES))]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_one_by_one_convolution_is_a_product_over_positions(stride):
    torch.manual_seed(0)
    module, x = nn.Conv2d(24, 40, 1, stride), torch.randn(3, 24, 9, 7)
    got, _ = quantised(module, x)
    rows = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1).reshape(-1, 24)
    args = rows, module.weight.detach().flatten(1), torch.ones(len(rows)), module.bias.detach()
    want = int8_product(*args, Form(), torch.float32)
    assert torch.equal(got.permute(0, 2, 3, 1).reshape(-1, 40), want)


@pytest.mark.parametrize("module", [nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(16, 8, 3, 2, 1)])
def test_what_is_not_finite_stays_where_it_is_read(module):
    x = torch.randn(2, 16, 8, 8)
    x[1, 3, 5, 5] = float("nan")
    got, exact = quantised(module, x)
    assert torch.equal(got.isfinite(), exact.isfinite())


# --- which take it


def site(kernel=3, stride=1, size=28, channels=(128, 128), batch=8, **facts):
    node = fx.Graph().placeholder("x")
    out = (size - 1) // stride + 1
    pairs = [(n, n) for n in (kernel, stride, kernel // 2, 1)]
    conv = Convolution(batch, (out, out), (size, size), channels[0], *pairs, False, True)
    base = {
        "name": "layer1.0.conv1",
        "rows": batch * out * out,
        "outputs": channels[1],
        "inputs": channels[0] * kernel**2,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "lead": (batch, out, out),
        "batched": True,
        "head": False,
        "nodes": ConvNodes(node, node, node, node, node, node, None, node),
        "conv": conv,
    }
    return Site(**{**base, **facts})


def choose(one, device_rates=VNNI, profile=None, **options):
    config = HotConfig.from_options({"forward": "int8", "lqs": "auto", **options})
    return plan([one], config, {one.device: device_rates}, profile).forwards[0]


@pytest.mark.parametrize(
    ("facts", "options", "says"),
    [
        ({"refusal": "depthwise convolution", "nodes": None}, {}, "depthwise convolution"),
        ({"first": True}, {}, "first layer"),
        ({"scores": True}, {}, "a softmax reads it"),
        ({"head": True}, {}, "its output is the model's"),
        ({}, {"exclude": "layer1.*"}, "in exclude"),
        ({}, {"override": {"*": "exact"}}, "chosen by override"),
        ({"batch": 0}, {}, "empty batch"),
        ({"kernel": 7, "stride": 2}, {"min_gain": 0}, "its unfolded x would be 12.2 times x"),
        ({"size": 4, "channels": (8, 8)}, {}, "not worth it"),
        ({}, {"rates": {"integer": 1e9}}, "no batch would change that"),
    ],
)
def test_what_stays_exact_says_why(facts, options, says):
    decision = choose(site(**facts), **options)
    assert not decision.int8
    assert says in decision.reason


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
def test_a_gpus_stay_exact(device):
    decision = choose(site(batch=128), RATES[device], min_gain=0)
    assert (decision.int8, decision.reason) == (False, NO_CONVOLUTIONS)


def test_what_pays_takes_it():
    assert choose(site()).predicted_gain > 2
    assert choose(site(kernel=1, channels=(512, 512))).predicted_gain > 1.5
    assert choose(site(stride=2, channels=(256, 256))).predicted_gain > 1.3
    assert choose(site(), recipe="exact").int8
    assert not choose(site(), RATES["cpu"]).int8, "without VNNI nothing pays"
    laid_out = dataclasses.replace(site().conv, rows_last=False)
    assert choose(site(conv=laid_out)).predicted_gain < choose(site()).predicted_gain


def test_one_that_is_too_small_says_from_which_batch_on_it_would_pay():
    slow = dataclasses.replace(VNNI, launch=2e-3)
    reason = choose(site(batch=1, size=14), slow).reason
    (batch,) = map(int, re.findall(r"it would pay from a batch of (\d+) on", reason))
    assert choose(site(batch=batch, size=14), slow).int8
    assert not choose(site(batch=batch - 1, size=14), slow).int8


def test_a_measured_output_is_held_to_the_budget():
    def measured(error):
        forward = {ROTATED: Measure(error, 1)}
        layer = LayerProfile(128, 1152, 6272, "float32", 2, {}, {}, None, None, {}, forward)
        return Profile(8, {"layer1.0.conv1": layer})

    assert choose(site(), profile=measured(0.01)).reason == "LQS: output error 0.01"
    assert "over budget 0.05" in choose(site(), profile=measured(0.3)).reason


# --- in graphs


class Block(nn.Module):
    """A residual bottleneck: 1 x 1, 3 x 3 and 1 x 1 behind a norm, and a strided shortcut.

    Smooth: with a ReLU the sign of what lies near 0 is all that gradients would show.
    """

    def __init__(self, width=32, bias=False, stride=2):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.reduce = nn.Conv2d(width, 16, 1, bias=bias)
        self.conv = nn.Conv2d(16, 16, 3, stride, 1, bias=bias)
        self.same = nn.Conv2d(16, 16, 3, 1, 1, bias=bias)
        self.expand = nn.Conv2d(16, 48, 1, bias=bias)
        self.shortcut = nn.Conv2d(width, 48, 1, stride, bias=bias)

    def forward(self, x):
        x = self.norm(x)
        y = F.silu(self.same(F.silu(self.conv(F.silu(self.reduce(x))))))
        return F.silu(self.expand(y) + self.shortcut(x))


def images(*shape, last=True):
    form = torch.channels_last if last else torch.contiguous_format
    return torch.randn(shape).contiguous(memory_format=form)


@pytest.mark.parametrize("module", [nn.Conv2d(16, 24, 3, 1, 1), nn.Conv2d(16, 24, 1)])
def test_gradients_pass_straight_through(module):
    torch.manual_seed(0)
    x = images(3, 16, 7, 9).requires_grad_()
    x_in = x.detach()

    def model(x):
        return module(x * 1.0)

    model.zero_grad, model.parameters = module.zero_grad, module.parameters
    y, (g_w, g_b), reports = step(model, x, options=EXACT_BACKWARD)
    assert calls(reports, PRODUCT) + calls(reports, ADDED_UP) == 1
    torch.testing.assert_close(y, quantised(module, x_in)[0])
    g_y, padding = 2 * y / y.numel(), module.padding
    settings = ([1, 1], list(padding), [1, 1], False, [0, 0], 1, [True, True, True])
    want = torch.ops.aten.convolution_backward(g_y, x_in, module.weight, [24], *settings)
    for mine, theirs in zip((x.grad, g_w, g_b), want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("autocast", "bias", "last"),
    [
        (None, True, True),
        (torch.bfloat16, False, False),
        pytest.param(None, False, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_trains_nearly_as_exact_and_holds_no_more(autocast, bias, last, lower):
    torch.manual_seed(0)
    model, x = Block(bias=bias), images(4, 32, 12, 10, last=last)
    model = model.to(memory_format=torch.channels_last) if last else model
    args = {"autocast": autocast, "lower": lower}
    y, gradients, reports = step(model, x, options=ALWAYS, **args)
    default = step(model, x, options={**ALWAYS, "forward": "exact"}, **args)
    assert (calls(reports, PRODUCT), calls(reports, ADDED_UP)) == (4, 1)
    assert calls(reports, "aten.convolution.default") == 0
    assert calls(default[2], PRODUCT) + calls(default[2], ADDED_UP) == 0
    assert reports[0].held_bytes <= default[2][0].held_bytes
    assert y.stride() == default[0].stride()
    assert sqnr(y, default[0]) > 35
    for mine, theirs in zip(gradients, default[1], strict=True):
        assert sqnr(mine, theirs) > 22


@pytest.mark.slow
def test_lowered_it_is_the_same():
    torch.manual_seed(0)
    model, x = Block(bias=True), images(4, 32, 12, 10)
    (y, *_), (lowered, *_) = (step(model, x, options=ALWAYS, lower=low) for low in (False, True))
    torch.testing.assert_close(lowered, y, rtol=1e-2, atol=1e-2)


def test_what_several_read_is_quantised_once():
    model = Block(stride=1)
    *_, reports = step(model, images(4, 32, 8, 8), options=ALWAYS)
    assert calls(reports, PRODUCT) == 3
    assert calls(reports, QUANTISE) == 4 + 5, "x of two layers once, and each weight"


def test_a_dynamic_batch():
    model = Block(bias=True)
    options = {**ALWAYS, "recipe": "exact"}
    run = torch.compile(
        model, dynamic=True, backend=partial(hot, options=options, inner_compile=run_uncompiled)
    )
    for batch in (5, 3):
        x = images(batch, 32, 12, 12)
        torch._dynamo.mark_dynamic(x, 0)
        for dim in (1, 2, 3):
            torch._dynamo.mark_static(x, dim)
        y = run(x)
        y.sum().backward()
        assert 33 < sqnr(y.detach(), model(x).detach()) < 80


def test_without_a_backward_nothing_changes():
    model, x = Block(), images(4, 32, 8, 8)
    run = torch.compile(model, backend=partial(hot, options=ALWAYS, inner_compile=run_uncompiled))
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    model.requires_grad_(False)
    torch.testing.assert_close(run(x), model(x))


def test_a_checkpointed_region_is_computed_again_as_it_was():
    torch.manual_seed(0)
    model, x = Block(bias=True), images(4, 32, 8, 8).requires_grad_()
    options = {**EXACT_BACKWARD}

    y, gradients, reports = step(Checkpointed(model), x, options=options)
    plain = step(model, x, options=options)
    assert torch.equal(y, plain[0])
    assert calls(reports, ADDED_UP) == 1
    assert calls(reports, ADDED_UP, "backward") == 1, "an exact backward has none of its own"
    assert reports[0].held_bytes < plain[2][0].held_bytes
    for mine, theirs in zip(gradients, plain[1], strict=True):
        torch.testing.assert_close(mine, theirs)


class Whole(nn.Module):
    """A first convolution, a depthwise one, one in between, and one that classifies pixels."""

    def __init__(self, scored):
        super().__init__()
        self.stem, self.scored = nn.Conv2d(3, 16, 3, 1, 1), scored
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.middle, self.head = nn.Conv2d(16, 32, 3, 1, 1), nn.Conv2d(32, 5, 1)

    def forward(self, x):
        y = self.head(self.middle(self.depthwise(self.stem(x).relu())).relu())
        return y.log_softmax(1) if self.scored else y


@pytest.mark.parametrize("scored", [True, False])
def test_first_depthwise_and_last_ones_stay_exact(scored):
    torch.manual_seed(0)
    model, x = Whole(scored), images(2, 3, 8, 8)
    *_, reports = step(model, x, options={**ALWAYS, "keep_head": True})
    reasons = {f.site: f.reason for f in reports[0].plan.forwards}
    assert [f.int8 for f in reports[0].plan.forwards if f.site == "middle"] == [True]
    assert "first layer" in reasons["stem"]
    assert "depthwise" in reasons["depthwise"]
    assert reasons["head"].startswith("a softmax reads it" if scored else "head")
    backward = {d.site: d.strategy for d in reports[0].plan}
    assert backward["head"] == "int8", "its backward is as it was"
    text = str(Explanation(tuple(reports)))
    assert "forward: 1 of 4 products on INT8" in text


def test_one_on_int8_gets_no_exact_form(monkeypatch):
    monkeypatch.setattr("hot_compile.passes.exact.patches.wants_grad_input", lambda _: False)
    patches = nn.Sequential(nn.GroupNorm(4, 8), nn.Conv2d(8, 16, 2, 2), nn.SiLU())
    options = {**EXACT_BACKWARD, "exact_forms": True}
    *_, reports = step(patches, images(2, 8, 8, 8), options=options)
    (form,) = reports[0].plan.exact_forms
    assert (form.taken, form.reason) == (False, "its forward is rewritten")


def test_one_that_cannot_be_built_stays_exact(monkeypatch):
    from hot_compile.passes.forward import rewrite as rewriting

    def fails(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(rewriting, "int8_convolution", fails)
    model, x = Block(), images(4, 32, 8, 8)
    y, _, reports = step(model, x, options=ALWAYS)
    whys = {forward.reason for forward in reports[0].plan.forwards}
    assert whys == {"could not be rewritten: RuntimeError: no"}
    torch.testing.assert_close(y, model(x).detach())


# --- measured


def test_an_error_is_of_what_varies_over_positions():
    torch.manual_seed(0)
    module = nn.Conv2d(32, 24, 3, 1, 1)
    node = fx.Graph().placeholder("x")
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node.args = (None, None, None, None, *settings)
    nodes = ConvNodes(node, node, node, node, node, node, None, node)

    def error(x):
        one = site(nodes=nodes, conv=geometry(module, x, module(x)))
        ((found, cosine),) = conv_forward_measures(one, module.weight.detach(), x).values()
        assert math.isclose(float(cosine), 1, abs_tol=0.1)
        return float(found)

    usual = torch.randn(4, 32, 16, 16)
    assert error(usual) < 0.012
    assert error(usual + 50 * (torch.arange(32) == 5).view(-1, 1, 1)) > 2 * error(usual)


def test_calibration_measures_outputs(calibrated_node_by_node):
    torch.manual_seed(0)
    model, x = Whole(True), images(8, 3, 12, 12)
    found = calibrate(model, [x], lambda m, b: m(b).square().mean(), progress=False)
    errors = {name: layer.forward[ROTATED].error for name, layer in found.layers.items()}
    assert errors.keys() == {"stem", "middle", "head"}
    assert all(0.001 < error < 0.03 for error in errors.values())
