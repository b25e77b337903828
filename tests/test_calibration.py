"""Calibration end to end: what it measures, what it leaves alone, what is made of its profile."""

import copy
import json
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hot_compile
from hot_compile import calibrate, calibration
from hot_compile.config import Strategy
from hot_compile.errors import CalibrationError, ProfileFormatError, ProfileMismatchError
from hot_compile.inspect import explain
from hot_compile.observing.collector import Collector
from hot_compile.passes.profile.profile import Profile
from hot_compile.testing import cosine, hot_step

ALWAYS = {"min_gain": 0, "keep_head": False}


class Net(nn.Module):
    """Everything calibration must put back: BatchNorm, dropout, numpy's and Python's randomness.

    ``eye``: an operator whose decomposition only Inductor lowers.
    """

    def __init__(self, eye=False):
        super().__init__()
        self.eye = eye
        self.fc1, self.norm, self.fc2 = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.norm(self.fc1(F.layer_norm(x, (64,))))
        x = F.dropout(self.fc2(F.gelu(x)), 0.1, self.training)
        return self.head(x + torch.eye(len(x), 64) if self.eye else x)


def batches(count=3, rows=64):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 64, generator=draw), torch.randint(10, (rows,), generator=draw))
        for _ in range(count)
    ]


def loss_of(model, batch):
    random.random()
    numpy.random.rand()
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def profile():
    """Of steps that are lowered as a user's are."""
    torch.manual_seed(0)
    return calibrate(Net(eye=True), batches(), loss_of, progress=False)


def test_every_layer_and_every_strategy_is_measured(profile):
    assert set(profile.layers) == {"fc1", "fc2", "head"}
    fc2 = profile.layers["fc2"]
    assert (fc2.outputs, fc2.inputs, fc2.rows, fc2.batches) == (64, 96, 64, 3)
    assert set(fc2.grad_input) == {"int4", "int8", "int4/tensor", "int8/tensor"}
    granules = {"int8", "hla8/batch", "hla8/consecutive"}
    assert set(fc2.grad_weight) == granules | {f"{name}/tensor" for name in granules}
    assert not profile.layers["fc1"].grad_input  # nobody wants the gradient of the model's input
    for layer in profile.layers.values():
        errors = {name: m.error for name, m in layer.grad_weight.items()}
        assert 0 < errors["int8"] < 0.05 < errors["hla8/consecutive"] < 1.2
        assert all(0.3 < m.cosine <= 1.001 for m in layer.grad_weight.values())
        assert 0 < layer.token_error < layer.tensor_error < 0.2


def test_measured_errors_are_those_of_the_rewritten_step():
    """The profile's g_w error is what training then has: same layer, same batch."""
    torch.manual_seed(0)
    model, (batch,) = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), batches(1)
    one = calibrate(model, [batch], lambda m, b: m(b[0]).square().mean(), progress=False)
    model(batch[0]).square().mean().backward()
    exact = model[2].weight.grad.clone()
    for strategy in ("hla8", "int8"):
        model.zero_grad()
        options = {**ALWAYS, "override": {"2": strategy}, "exclude": ["0"], "recompute": False}
        hot_step(lambda x: model(x).square().mean(), batch[0], options=options)
        got = model[2].weight.grad
        measured = one.layers["2"].grad_weight["hla8/batch" if strategy == "hla8" else strategy]
        error = float((got - exact).norm() / exact.norm())
        assert error == pytest.approx(measured.error, rel=0.02)
        assert cosine(got, exact) == pytest.approx(measured.cosine, abs=1e-3)


def test_the_whole_steps_gradients_are_compared(profile):
    """Of every parameter, rewritten layers and stored activations together."""
    assert profile.gradients.keys() == {name for name, _ in Net().named_parameters()}
    real = {name: m for name, m in profile.gradients.items() if name != "fc1.bias"}  # normalised
    assert all(m.cosine > 0.98 and m.error < 0.2 for m in real.values())


def test_an_operator_that_inductor_decomposes(profile):
    assert profile.layers.keys() == {"fc1", "fc2", "head"}
    assert len(explain(Net(eye=True), batches()[0][0]).graphs) == 1


def test_what_cannot_be_observed_is_refused(calibrated_node_by_node, monkeypatch):
    monkeypatch.setattr(calibration, "pricing", lambda device: "no runtime for cpu: no compiler")
    with pytest.raises(CalibrationError, match="no compiler"):
        calibrate(Net(), batches(1), loss_of, progress=False)
    monkeypatch.undo()
    monkeypatch.setattr(Collector, "_measure", lambda *_: 1 / 0)
    with pytest.raises(CalibrationError, match=r"could not be observed .*ZeroDivisionError"):
        calibrate(Net(), batches(1), loss_of, progress=False)


def test_profiles_of_version_1_are_read(profile):
    data = profile.to_json()
    del data["gradients"]
    data["version"] = 1
    old = Profile.from_json(data)
    assert old.layers == profile.layers
    assert not old.gradients
    assert old.content_hash() == profile.content_hash()


def test_nothing_is_changed():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches()[0]).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    calibrate(model, batches(), loss_of, progress=False)
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    torch.testing.assert_close(before[1]["state"], after[1]["state"], rtol=0, atol=0)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == numpy.random.get_state()[1].tolist()
    assert model.training


def test_an_error_in_the_loss_leaves_the_model_as_it_was():
    model = Net()
    before = copy.deepcopy(model.state_dict())

    def failing(m, batch):
        loss_of(m, batch).backward()
        raise RuntimeError("user's bug")

    with pytest.raises(RuntimeError, match="user's bug"):
        calibrate(model, batches(), failing, progress=False)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_under_autocast_and_with_a_frozen_layer(calibrated_node_by_node):
    torch.manual_seed(0)
    model = Net()
    model.fc2.weight.requires_grad_(False)

    def loss_fn(m, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m, batch) * 1024

    found = calibrate(model, batches(), loss_fn, progress=False)
    assert found.layers["fc2"].dtype == "bfloat16"
    assert not found.layers["fc2"].grad_weight
    assert found.layers["fc2"].grad_input["int8"].error < 0.05


def test_batches_without_a_gradient_are_refused():
    with pytest.raises(CalibrationError, match="finite, non-zero"):
        calibrate(Net(), batches(), lambda m, b: loss_of(m, b) * 0, progress=False)
    with pytest.raises(CalibrationError):
        calibrate(Net(), [], loss_of, progress=False)


def test_a_batch_that_overflows_is_skipped(calibrated_node_by_node):
    found = calibrate(
        Net(),
        batches(3),
        lambda m, b: loss_of(m, b) * (float("inf") if b[0][0, 0] == batches()[0][0][0, 0] else 1),
        progress=False,
    )
    assert {layer.batches for layer in found.layers.values()} == {2}


def test_file_round_trip_and_hash(profile, tmp_path):
    path = tmp_path / "deep" / "profile.json"
    profile.save(path)
    again = Profile.load(path)
    assert again == profile
    assert again.content_hash() == profile.content_hash()
    data = json.loads(path.read_text())
    data["environment"]["torch"] = "0"
    assert Profile.from_json(data).content_hash() == profile.content_hash()
    data["layers"]["fc1"]["grad_weight"]["int8"]["error"] = 0.5
    assert Profile.from_json(data).content_hash() != profile.content_hash()
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="other"), "no profile"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.pop("layers"), "entries do not fit"),
        (lambda d: d["layers"]["fc1"].update(outputs="many"), "entries do not fit"),
        (lambda d: d["layers"]["fc1"].update(extra=1), "entries do not fit"),
        (lambda d: d["layers"]["fc1"]["grad_weight"]["int8"].update(error="x"), "do not fit"),
        (lambda d: d["layers"]["fc1"]["grad_weight"]["int8"].update(error=float("nan")), "finite"),
        (lambda d: d["layers"].update(fc1=[]), "entries do not fit"),
    ],
)
def test_bad_files_are_refused(profile, tmp_path, change, says):
    data = json.loads(json.dumps(profile.to_json()))
    change(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileFormatError, match=says):
        Profile.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_what_is_no_json_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ProfileFormatError):
        Profile.load(path)
    with pytest.raises(ProfileFormatError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_the_backend_chooses_by_the_profile(profile, tmp_path):
    path = tmp_path / "p.json"
    profile.save(path)
    model, (x, _) = Net(), batches(1)[0]

    def strategies(**options):
        found = explain(model, x, options={**ALWAYS, "profile": path, **options})
        return {d.site: str(d.strategy) for d in found.plan}, found.plan["fc2"].reason

    chosen, reason = strategies()
    assert chosen == {"fc1": "int8", "fc2": "int8", "head": "int8"}
    assert reason.startswith("LQS: g_w error 0.0")
    errors = profile.layers["fc2"].grad_weight
    between = (errors["int8"].error + errors["hla8/batch"].error) / 2
    chosen, reason = strategies(strategies="hla8", error_budget=between)
    assert chosen["fc2"] == Strategy.INT8
    assert "no hla8: g_w error" in reason
    chosen, reason = strategies(error_budget=1e-4)
    assert chosen["fc2"] == Strategy.EXACT
    assert "no int8: g_w error" in reason
    assert strategies(recipe="fast", error_budget=1.5)[0]["fc2"] == Strategy.HLA8
    assert strategies(recipe="fast", error_budget=0.2)[0]["fc2"] == Strategy.INT8


def test_papers_rule_per_token(profile, tmp_path):
    """Scales of g_y per row where that cuts its error by more than half: it shows in g_x."""
    path = tmp_path / "p.json"
    model, (x, _) = Net(), batches(1)[0]
    data = profile.to_json()
    data["layers"]["fc2"].update(token_error=0.01, tensor_error=0.03)
    data["layers"]["head"].update(token_error=0.02, tensor_error=0.03)
    path.write_text(json.dumps(data))
    plan = explain(model, x, options={**ALWAYS, "recipe": "paper", "profile": path}).plan
    assert (plan["fc2"].per_token, plan["head"].per_token) == (True, False)
    assert "per token (error 0.01 against 0.03)" in plan["fc2"].reason
    assert "per tensor (error 0.02 against 0.03)" in plan["head"].reason


def test_per_token_scales_repair_rows_beside_an_outlier(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(64, 64, requires_grad=True)
    weights = torch.ones(64, 1)
    weights[5] = 200.0

    def loss_fn(m, x):
        return (m(x).tanh() * weights).sum()

    def grad(**options):
        x.grad = None
        hot_step(lambda x: loss_fn(model, x), x, options={**ALWAYS, **options})
        return x.grad[torch.arange(64) != 5]

    found = calibrate(model, [x], loss_fn, progress=False)
    assert found.layers["0"].token_error < 0.5 * found.layers["0"].tensor_error
    found.save(tmp_path / "p.json")
    exact = grad(recipe="exact")
    assert cosine(grad(recipe="paper"), exact) < 0.9
    assert cosine(grad(recipe="paper", profile=tmp_path / "p.json"), exact) > 0.97


def test_a_profile_of_another_model_is_refused_with_what_does_not_fit(profile, tmp_path):
    path = tmp_path / "p.json"
    profile.save(path)
    other = nn.ModuleDict(
        {"fc1": nn.Linear(64, 32), "new": nn.Linear(32, 8), "fc2": nn.Linear(8, 8)}
    )

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = other

        def forward(self, x):
            return self.parts["fc2"](self.parts["new"](self.parts["fc1"](x)))

    compiled = torch.compile(Other(), backend="hot", options={"profile": path})
    with pytest.raises(Exception, match="does not fit this model") as error:
        compiled(torch.randn(64, 64)).sum().backward()
    assert isinstance(error.value.inner_exception, ProfileMismatchError)
    assert "parts.fc1 (32 x 64): not in the profile" in str(error.value)
    with pytest.raises(Exception, match="asked to train with rank=4"):
        explain(Net(), torch.randn(64, 64), options={"profile": path, "rank": 4})
    torch._dynamo.reset()
    wider = Net()
    wider.fc2, wider.head = nn.Linear(96, 80), nn.Linear(80, 10)
    with pytest.raises(Exception, match="fc2: 80 x 96, in the profile 64 x 96"):
        explain(wider, torch.randn(64, 64), options={"profile": path})


def test_public_names():
    assert hot_compile.calibrate is calibrate
    assert hot_compile.Profile is Profile


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_cuda(autocast):
    torch.manual_seed(0)
    model, found = Net(), {}
    states = torch.cuda.get_rng_state()
    for device in ("cpu", "cuda"):
        model.to(device)

        def loss_fn(m, batch, device=device):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                return loss_of(m, [t.to(device) for t in batch])

        model.eval()  # the same gradients on both: no dropout
        found[device] = calibrate(model, batches(), loss_fn, progress=False).layers
    assert torch.equal(states, torch.cuda.get_rng_state())
    assert found["cpu"].keys() == found["cuda"].keys()
    for name, layer in found["cpu"].items():
        for variant, measure in layer.grad_weight.items():
            got = found["cuda"][name].grad_weight[variant]
            # a GPU's rounding of folded scales is stochastic: 2 % of an error of 1 % is its noise
            assert got.error == pytest.approx(measure.error, rel=0.15 if autocast else 0.05)
