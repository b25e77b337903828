"""Bits of what crosses, by measurement: from calibration to what is held."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from samples_storage import Block
from torch import nn

from hot_compile import calibrate, calibration
from hot_compile.accounting import Measured, MemoryReport
from hot_compile.backend import hot
from hot_compile.errors import ProfileFormatError
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.profile.profile import Profile
from hot_compile.testing import cosine

ALWAYS = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 1024}


class Mlp(nn.Module):
    """A residual block; with ``outliers`` a few channels that the next layer scales back."""

    def __init__(self, width=128, outliers=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if outliers:
            with torch.no_grad():
                self.fc1.bias[5::64] = outliers
                self.fc2.weight[:, 5::64] /= outliers

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(outliers=3000.0), Mlp())
    x, target = torch.randn(4, 64, 128), torch.randn(4, 64, 128)
    return model, x, lambda m: (m(x) * target).mean()


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Of ``problem``, and its file."""
    model, _, loss = problem()
    with pytest.MonkeyPatch.context() as patch:
        found = measured(model, loss, patch)
    path = tmp_path_factory.mktemp("profile") / "p.json"
    found.save(path)
    return found, path


def measured(model, loss, monkeypatch, **options):
    """The profile, from graphs that run uncompiled."""
    monkeypatch.setattr(calibration, "hot", functools.partial(hot, inner_compile=run_uncompiled))
    options = {**ALWAYS, **options}
    return calibrate(model, [0], lambda m, _: loss(m), options=options, progress=False)


def step(model, loss, **options):
    """(gradients, the largest crossing tensor by module) of one step."""
    gradients, kept = crossing(model, loss, **options)
    return gradients, {c.module: c for c in reversed(kept)}


def crossing(model, loss, **options):
    """(gradients, crossing tensors, the largest first) of one step."""
    model.zero_grad()
    torch._dynamo.reset()
    reports = Reports()
    backend = functools.partial(
        hot, options={**ALWAYS, **options}, recorder=reports, inner_compile=run_uncompiled
    )
    loss(torch.compile(model, backend=backend)).backward()
    kept = [c for graph in reports.graphs for c in graph.crossing]
    return {n: p.grad.clone() for n, p in model.named_parameters()}, kept


def exactly(model, loss):
    model.zero_grad()
    loss(model).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_an_outlier_costs_only_its_own_tensor_bits(profile):
    (_, path), (model, _, loss) = profile, problem()
    want = exactly(model, loss)
    _, trusted = step(model, loss)
    got, kept = step(model, loss, profile=path)
    assert [kept[f"{n}.fc1"].scheme for n in range(3)] == ["int4", "rows8", "int4"]
    assert "no groups6: 0." in kept["1.fc1"].reason
    assert kept["0.fc1"].reason.startswith("LQS: error 0.1")
    assert trusted["0.fc1"].bytes > kept["0.fc1"].bytes
    assert all(cosine(got[name], want[name]) > 0.98 for name in want)
    _, four = step(model, loss, memory_bits=4)
    assert four["1.fc1"].scheme == "int4"  # on trust, which it does not deserve here


def test_what_is_measured_is_what_training_then_has(monkeypatch, tmp_path):
    """The profile's error of a weight's gradient is that of a step that stores the tensor so."""
    torch.manual_seed(0)
    # bounded, so that every scheme is allowed
    model = nn.Sequential(nn.Tanh(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    x, target = torch.randn(512, 128), torch.randn(512, 64)
    loss = lambda m: (m(x) * target).mean()  # noqa: E731
    found = measured(model, loss, monkeypatch).storage["1:addmm"]
    want = exactly(model, loss)
    for bits, scheme in ((4, Scheme.INT4), (6, Scheme.GROUPS6), (8, Scheme.ROWS8)):
        got, kept = step(model, loss, memory_bits=bits, exclude="*")
        assert kept["1"].scheme == str(scheme)
        errors = [float((got[n] - want[n]).norm() / want[n].norm()) for n in want]
        assert max(errors) == pytest.approx(found[scheme].error, rel=0.02)


def test_rows_that_cancel_stay_finer(monkeypatch, tmp_path):
    """A gradient in few rows, of features that these have in common: errors do not average out."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Mlp(), nn.Linear(128, 10)

        def forward(self, x):
            return self.head(self.block(x)[:, 0])

    torch.manual_seed(0)
    model, x, y = Pooled(), torch.randn(8, 64, 128), torch.arange(8)
    x[:, 0] = x[0, 0] + 0.02 * torch.randn(8, 128)  # class tokens, much alike
    loss = lambda m: F.cross_entropy(m(x), y)  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    measured(model, loss, monkeypatch).save(tmp_path / "p.json")
    want = exactly(model, loss)
    got, _ = step(model, loss, exclude="*", memory_bits=4)
    assert cosine(got["block.fc2.weight"], want["block.fc2.weight"]) < 0.97
    got, kept = step(model, loss, exclude="*", profile=tmp_path / "p.json")
    assert kept["block.fc1"].scheme == "rows8"
    assert "no groups6" in kept["block.fc1"].reason
    assert all(cosine(got[name], want[name]) > 0.99 for name in want)


def test_attention_is_stored_in_8_bits_where_that_was_measured(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 64, 128)
    target = torch.randn_like(x)
    loss = lambda m: (m(x) * target).mean()  # noqa: E731
    want = exactly(model, loss)

    _, before = crossing(model, loss)
    assert not {c.scheme for c in before} & {"groups8"}
    measured(model, loss, monkeypatch).save(tmp_path / "p.json")
    got, after = crossing(model, loss, profile=tmp_path / "p.json")
    assert sum(c.scheme == "groups8" for c in after) >= 3  # q, k, v
    assert sum(c.bytes for c in after) < 0.8 * sum(c.bytes for c in before)
    assert all(cosine(got[name], want[name]) > 0.98 for name in want)


def test_norms_go_below_8_bits_only_where_asked(profile):
    (_, path), (model, _, loss) = profile, problem()
    _, kept = step(model, loss, profile=path)
    assert kept["2.norm"].scheme == "rows8"
    _, kept = step(model, loss, profile=path, memory_bits=4)
    assert kept["2.norm"].scheme == "int4"
    _, kept = step(model, loss, profile=path, memory_bits=8)
    assert {kept[f"{n}.fc1"].scheme for n in range(3)} == {"rows8"}


def test_a_profile_keeps_what_was_measured(profile, tmp_path):
    (profile, _), (model, _, loss) = profile, problem()
    assert {"0.fc1:addmm", "1.fc1:addmm", "2.fc1:addmm"} <= profile.storage.keys()
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    data = profile.to_json()
    old = Profile.from_json({**{k: v for k, v in data.items() if k != "storage"}, "version": 3})
    assert old.storage == {}
    assert old.content_hash() != profile.content_hash()  # other code is compiled by it
    old.save(tmp_path / "old.json")
    _, kept = step(model, loss, profile=tmp_path / "old.json")
    assert {kept[f"{n}.fc1"].scheme for n in range(3)} == {"groups6"}
    merged = old.merged(profile)
    assert merged.storage == profile.storage


def test_entries_that_do_not_fit_are_refused(profile):
    data = profile[0].to_json()
    entry = data["storage"]["0.fc1:addmm"]
    for wrong in ({"int3": entry["int4"]}, {"int4": {"error": "small", "passed": 0.0}}, [1]):
        data["storage"]["0.fc1:addmm"] = wrong
        with pytest.raises(ProfileFormatError, match="entries do not fit"):
            Profile.from_json(data)


def test_the_report_shows_the_errors(profile):
    (_, path), (model, _, loss) = profile, problem()
    _, kept = crossing(model, loss, profile=path)
    report = MemoryReport(tuple(kept), {"exact": Measured(1, 0, 1)})
    assert "LQS: error 0.1" in str(report)
    assert any(c["reason"].startswith("LQS: ") for c in report.to_json()["crossing"])


def test_auto_finds_the_bits_by_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, _, loss = problem()
    torch._dynamo.reset()
    reports = Reports()
    options = {**ALWAYS, "lqs": "auto", "lqs_warm_up": 1, "lqs_batches": 1, "lqs_rechecks": 0}
    backend = functools.partial(
        hot, options=options, recorder=reports, inner_compile=run_uncompiled
    )
    compiled = torch.compile(model, backend=backend)
    for _ in range(4):
        loss(compiled).backward()
    first, last = ({c.module: c.scheme for c in g.crossing[::-1]} for g in reports.graphs)
    assert {first[f"{n}.fc1"] for n in range(3)} == {"groups6"}
    assert [last[f"{n}.fc1"] for n in range(3)] == ["int4", "rows8", "int4"]
