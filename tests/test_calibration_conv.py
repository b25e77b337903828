"""Convolutions in calibration: measured by the nodes that would run, chosen by what they told."""

import copy
import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hot_compile
from hot_compile import calibrate, calibration
from hot_compile.backend import hot
from hot_compile.inspect import explain, run_uncompiled
from hot_compile.passes.profile.profile import Profile
from hot_compile.testing import cosine, hot_step

ALWAYS = {"min_gain": 0, "memory": "off"}
GRANULES = {"int8", "hla8/batch", "hla8/consecutive"}


class Block(nn.Module):
    """A residual block: 3 x 3 with BatchNorm, stride 2, and a 1 x 1 shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Every kind of convolution the plan knows: first, 3 x 3, strided, 1 x 1, depthwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(1, 16, 3, 1, 1)
        self.block = Block(16, 32)
        self.depthwise = nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = F.batch_norm(self.stem(x), None, None, training=True)
        x = self.block(x.relu())
        return self.head(self.depthwise(x).mean((2, 3)))


CONVS = {"stem", "block.conv1", "block.conv2", "block.shortcut"}


def batches(count=2, rows=16, size=16):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 1, size, size, generator=draw), torch.arange(rows) % 10)
        for _ in range(count)
    ]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def calibrated(calibrated_node_by_node):
    """(profile, what calibrating changed)."""
    model = ResNet()
    before, states = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = calibrate(model, batches(), loss_of, progress=False)
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(before[name], value)
    }
    changed |= {f"gradient of {n}" for n, p in model.named_parameters() if p.grad is not None}
    changed |= set() if torch.equal(states, torch.get_rng_state()) else {"random state"}
    return found, changed


@pytest.fixture(scope="module")
def profile(calibrated):
    return calibrated[0]


def step_of(model, lower=False, **options):
    """The model under "hot"."""
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options={**ALWAYS, **options}, **keywords)
    return torch.compile(model, backend=backend)


def test_every_convolution_and_every_strategy_is_measured(profile):
    assert set(profile.layers) == CONVS | {"head"}  # the depthwise one is left alone
    layer = profile.layers["block.conv1"]
    assert (layer.outputs, layer.inputs, layer.rows, layer.batches) == (32, 16 * 9, 16 * 8 * 8, 2)
    assert set(layer.grad_input) == {"int4", "int8", "int4/tensor", "int8/tensor"}
    assert set(layer.grad_weight) == GRANULES | {f"{name}/tensor" for name in GRANULES}
    assert not profile.layers["stem"].grad_input
    for name in CONVS:
        errors = {key: m.error for key, m in profile.layers[name].grad_weight.items()}
        assert 0 < errors["int8"] < errors["hla8/consecutive"] < 1.2
        assert errors["int8"] < 0.05


@pytest.mark.slow
def test_compiled_as_in_a_users_run_it_measures_the_same(profile, monkeypatch):
    """But for sums in another order: other last bits draw other random bits for g_y's rounding.

    Of the few values of the smallest layers errors differ by up to 9 % so.
    """
    monkeypatch.setattr(calibration, "hot", hot)
    lowered = calibrate(ResNet(), batches(), loss_of, progress=False)
    assert set(lowered.layers) == set(profile.layers)
    for name, layer in lowered.layers.items():
        for variant, measured in layer.grad_weight.items():
            expected = profile.layers[name].grad_weight[variant].error
            assert measured.error == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("kernel", "stride", "apart"),
    [(3, 2, 0.02), (1, 1, 0.06), pytest.param(3, 1, 0.02, marks=pytest.mark.slow)],
)
def test_measured_errors_are_those_of_the_rewritten_step(
    kernel, stride, apart, calibrated_node_by_node
):
    """The profile's g_w error is what training then has.

    A 1 x 1 convolution's INT8 is 3.9 % off (0.001516 for 0.001459), for a reason not yet found.
    """
    torch.manual_seed(0)
    second = nn.Conv2d(16, 32, kernel, stride, kernel // 2)
    model, x = nn.Sequential(nn.Conv2d(8, 16, 3), nn.SiLU(), second), torch.randn(16, 8, 14, 14)
    one = calibrate(model, [x], lambda m, b: m(b).square().mean(), progress=False)
    model(x).square().mean().backward()
    exact = second.weight.grad.clone()
    for strategy in ("hla8", "int8"):
        model.zero_grad()
        options = {**ALWAYS, "override": {"2": strategy}, "exclude": ["0"], "recompute": False}
        options["memory"] = "off"
        hot_step(lambda x: model(x).square().mean(), x, options=options)
        got = second.weight.grad
        variant = "hla8/batch" if strategy == "hla8" else strategy
        measured = one.layers["2"].grad_weight[variant]
        error = float((got - exact).norm() / exact.norm())
        assert error == pytest.approx(measured.error, rel=apart)
        assert cosine(got, exact) == pytest.approx(measured.cosine, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(8, 16, 5, padding=2), (16, 8, 32)),
        (lambda: nn.Conv2d(8, 16, 3, dilation=2), (16, 8, 12, 12)),
        (lambda: nn.Conv3d(8, 16, 3, padding=1), (4, 8, 6, 6, 6)),
        (lambda: nn.ConvTranspose2d(8, 16, 2, 2), (16, 8, 6, 6)),
    ],
)
def test_every_geometry(make, shape, calibrated_node_by_node):
    torch.manual_seed(0)
    model, x = nn.Sequential(make(), nn.ReLU()), torch.randn(shape, requires_grad=True)
    found = calibrate(model, [x], lambda m, b: m(b).square().mean(), progress=False).layers["0"]
    assert set(found.grad_weight) == GRANULES | {f"{name}/tensor" for name in GRANULES}
    assert found.grad_weight["int8"].error < 0.05
    transposed = isinstance(model[0], nn.ConvTranspose2d)
    assert set(found.grad_input) == (set() if transposed else {
        "int4", "int8", "int4/tensor", "int8/tensor"
    })  # fmt: skip
    if not transposed:
        assert found.grad_input["int8"].error < 0.05


def test_nothing_is_changed(calibrated):
    assert calibrated[1] == set()


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_an_observed_step_are_the_usual_ones(tmp_path, lower):
    """Looking changes nothing, batch norm's statistics included."""
    models = ResNet(), ResNet()
    looks = {"lqs": "auto", "lqs_warm_up": 0, "lqs_rechecks": 0, "profile": tmp_path / "p.json"}
    for model, options in zip(models, ({}, looks), strict=True):
        torch._dynamo.reset()
        loss_of(step_of(model, lower, **options), batches(1)[0]).backward()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_backend_chooses_by_the_profile(profile, tmp_path):
    path = tmp_path / "p.json"
    profile.save(path)
    model, (x, _) = ResNet(), batches(1)[0]

    def decision(name="block.conv2", **options):
        found = explain(model, x, options={**ALWAYS, "profile": path, **options})
        return found.plan[name]

    chosen = decision()
    assert chosen.strategy == "int8"
    assert chosen.reason.startswith("LQS: g_w error")
    errors = profile.layers["block.conv2"].grad_weight
    between = (errors["int8"].error + errors["hla8/batch"].error) / 2
    chosen = decision(strategies="hla8", error_budget=between)
    assert chosen.strategy == "int8"
    assert "no hla8: g_w error" in chosen.reason
    assert decision(error_budget=1e-4).strategy == "exact"
    assert decision("stem").strategy == "exact"
    one_by_one = decision("block.shortcut", recipe="fast", error_budget=1.5)
    assert one_by_one.strategy in ("hla8", "int8")
    assert "hla8" not in str(decision("block.conv2", recipe="fast", error_budget=0.2).strategy)


def test_a_profile_without_the_convolutions_is_refused(profile, tmp_path):
    data = profile.to_json()
    del data["layers"]["block.conv2"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(Exception, match=r"block.conv2 \(32 x 288\): not in the profile"):
        explain(ResNet(), batches(1)[0][0], options={**ALWAYS, "profile": path})


def test_fast_measures_convolutions_by_itself(tmp_path):
    """hla8 of a 1 x 1 convolution comes after the observed steps, within the budget only."""
    path = tmp_path / "p.json"
    options = {
        "recipe": "fast", "lqs": "auto", "profile": path, "lqs_warm_up": 1,
        "lqs_batches": 1, "lqs_rechecks": 0,
    }  # fmt: skip
    model = ResNet()
    step = step_of(model, **options)
    for batch in batches(4):
        loss_of(step, batch).backward()
    assert set(Profile.load(path).layers) == CONVS | {"head"}
    torch._dynamo.reset()
    plan = explain(model, batches(1)[0][0], options={**ALWAYS, **options}).plan
    assert all("LQS" in plan[name].reason for name in CONVS - {"stem"})


def test_the_monitor_watches_convolutions():
    seen = {}
    model, monitor = ResNet(), hot_compile.Monitor(every=1, rotate=1, callback=seen.__setitem__)
    step = step_of(model, monitor=monitor)
    for batch in batches(3):
        loss_of(step, batch).backward()
    found = seen[1]
    others = {"depthwise", "depthwise.bias", "block.norm1.weight"}
    assert found.keys() >= CONVS | {"head"} | others
    assert found["depthwise"].keys() == {"weight.grad"}
    assert {name for name, sides in found.items() if "g_w" in sides} == CONVS - {"stem"}
    for name in CONVS - {"stem"}:
        assert set(found[name]) == {"g_x", "g_w", "weight.grad"}
        assert all(0 < quality.error < 0.3 for quality in found[name].values())
