"""``lqs="auto"``: observe, recompile once, remember."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from hot_compile import calibrate
from hot_compile.backend import hot
from hot_compile.inspect import Reports, explain, run_uncompiled
from hot_compile.observing.collector import Collector
from hot_compile.passes.profile.profile import Profile
from hot_compile.runtime.native import build

ALWAYS = {
    "min_gain": 0, "keep_head": False, "lqs": "auto", "lqs_warm_up": 3, "lqs_batches": 2,
    "lqs_rechecks": 0,
}  # fmt: skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


@pytest.fixture(autouse=True)
def _own_cache(fresh_dynamo, tmp_path, monkeypatch):
    build.load("cpu")  # the library as it lies in the user's cache: building one takes a minute
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(model, steps, options, base=ALWAYS, **keywords):
    """(losses, plan of every compilation for good) of ``steps`` steps."""
    reports = Reports()
    keywords = {"inner_compile": run_uncompiled, **keywords}
    backend = functools.partial(hot, options={**base, **options}, recorder=reports, **keywords)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=draw)
        loss = F.mse_loss(compiled(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [g.plan for g in reports.graphs]


def test_observes_then_recompiles_once_with_its_choice(tmp_path):
    path = tmp_path / "p.json"
    options = {"profile": path, "error_budget": 0.004}
    losses, plans = train(net(), 12, options)
    assert kinds(plans) == ["int8", "exact"]  # the static choice, then what was measured
    assert "g_w error" in plans[-1]["2"].reason
    profile = Profile.load(path)
    assert set(profile.layers) == {"0", "2"}
    assert {layer.batches for layer in profile.layers.values()} == {2}
    assert losses[-1] < losses[0]
    torch._dynamo.reset()
    _, plans = train(net(), 2, options)
    assert kinds(plans) == ["exact"]


def kinds(plans):
    """The one strategy that all layers of each plan have."""
    found = [{str(d.strategy) for d in plan} for plan in plans]
    assert all(len(kind) == 1 for kind in found)
    return [kind.pop() for kind in found]


def test_no_hla_before_it_is_measured(tmp_path):
    options = {"recipe": "fast", "profile": tmp_path / "p.json", "error_budget": 1.5}
    _, plans = train(net(), 12, options)
    assert kinds(plans) == ["int8", "hla8"]
    assert plans[0]["2"].reason.startswith("no hla8: not measured yet")


def test_recipe_fast_measures_by_itself():
    """The one word is safe: HLA comes only where it was measured to be within the budget."""
    short = {"min_gain": 0, "keep_head": False, "recipe": "fast", "lqs_warm_up": 3}
    _, plans = train(net(), 12, {**short, "error_budget": 1.5}, base={})
    assert kinds(plans) == ["int8", "hla8"]
    torch._dynamo.reset()
    _, plans = train(net(), 12, {**short, "lqs": "off"}, base={})
    assert kinds(plans) == ["hla8"]


def test_a_calibrated_profile_is_used_as_it_is(tmp_path, calibrated_node_by_node):
    path = tmp_path / "p.json"
    losses = lambda model, x: model(x).square().mean()  # noqa: E731
    calibrate(net(), [torch.randn(64, 64)], losses, progress=False).save(path)
    before = path.read_text()
    options = {"min_gain": 0, "keep_head": False, "recipe": "fast", "profile": path}
    _, plans = train(net(), 8, {**options, "error_budget": 1.5, "lqs_warm_up": 2}, base={})
    assert kinds(plans) == ["hla8"]
    assert path.read_text() == before


def test_an_override_is_taken_on_trust():
    _, plans = train(net(), 1, {"recipe": "fast", "override": {"2": "hla8"}})
    assert [str(d.strategy) for d in plans[0]] == ["int8", "hla8"]


def test_nothing_is_compiled_again_where_the_choice_stays(tmp_path):
    path = tmp_path / "p.json"
    _, plans = train(net(), 12, {"profile": path})
    assert kinds(plans) == ["int8"]
    torch._dynamo.reset()
    _, plans = train(net(), 2, {"profile": path})
    assert "LQS: g_w error" in plans[0]["2"].reason


class Drifting(nn.Module):
    """HLA keeps the gradient of its first data, and loses much of it after ``turn`` batches."""

    def __init__(self, turn):
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.calls = turn, 0
        self.layer = nn.Linear(64, 96)

    def data(self, draw):
        self.calls += 1
        same = torch.ones(64, 1) + 0.05 * torch.randn(64, 64, generator=draw)
        mixed = torch.randn(64, 64, generator=draw)
        return same if self.calls <= self.turn else mixed

    def forward(self, x):
        return self.layer(x)


def drifting(turn, steps, path, rechecks):
    reports, model = Reports(), Drifting(turn)
    options = {
        **ALWAYS, "recipe": "fast", "profile": path, "error_budget": 0.4, "lqs_rechecks": rechecks,
    }  # fmt: skip
    backend = functools.partial(
        hot, options=options, recorder=reports, inner_compile=run_uncompiled
    )
    step, draw = torch.compile(model, backend=backend), torch.Generator().manual_seed(1)
    for _ in range(steps):
        step(model.data(draw)).square().mean().backward()
    return kinds([g.plan for g in reports.graphs])


def test_looks_again_and_takes_back_what_no_longer_holds(tmp_path):
    """Warm-up 3: looks after 3 forwards, and after 12 of the code that came of it."""
    path = tmp_path / "p.json"
    assert drifting(10, 40, path, rechecks=1) == ["int8", "hla8", "int8"]
    (looks,) = Profile.load(path).graphs.values()
    assert looks == 2
    torch._dynamo.reset()
    assert drifting(10, 40, path, rechecks=1) == ["int8"]  # nothing left to look for


def test_does_not_look_again_if_told_so(tmp_path):
    assert drifting(10, 80, tmp_path / "p.json", rechecks=0) == ["int8", "hla8"]


@pytest.mark.parametrize("rechecks", [0, 1, 2])
def test_compiles_at_most_as_often_as_promised(tmp_path, monkeypatch, rechecks):
    """Even if every look says something else: once at first, once a look."""
    seen = iter(range(1000))

    def flipping(self, layer, g, weight, x):
        error = torch.tensor(0.01 if next(seen) // 2 % 2 == 0 else 0.9)
        return {
            "grad_weight hla8/batch error": error, "grad_weight hla8/batch cosine": error,
            "token_error": error, "tensor_error": error,
        }  # fmt: skip

    monkeypatch.setattr(Collector, "_measure", flipping)
    got = drifting(0, 400, tmp_path / "p.json", rechecks)
    assert got == ["int8", "hla8", "int8", "hla8"][: 2 + rechecks]


class Stateful(nn.Module):
    """BatchNorm's statistics and dropout's random state are what observing could disturb."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.norm, self.fc2 = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)

    def forward(self, x):
        return self.fc2(F.dropout(self.norm(self.fc1(x)).relu(), 0.2, self.training))


def test_observing_changes_nothing_but_the_choice(tmp_path):
    """With every layer exact, a run that looks three times is bitwise one that never does."""

    def run(**options):
        torch._dynamo.reset()
        model = Stateful()
        torch.manual_seed(3)
        path = tmp_path / "p.json"
        base = {**ALWAYS, "override": {"*": "exact"}, "memory": "off", "profile": path}
        losses, plans = train(model, 60, {**base, **options})
        looks = sum(Profile.load(path).graphs.values()) if path.exists() else 0
        return losses, model.state_dict(), torch.get_rng_state(), looks, len(plans)

    losses, state, rng, looks, compiled = run(lqs_warm_up=10**6)
    assert (looks, compiled) == (0, 1)
    again = run(lqs_warm_up=1, lqs_rechecks=2)
    assert again[3:] == (3, 1)
    assert again[0] == losses
    assert torch.equal(again[2], rng)
    assert all(torch.equal(again[1][name], value) for name, value in state.items())


def test_a_cached_profile_that_cannot_be_read_is_made_anew(tmp_path):
    train(net(), 8, {})
    (kept,) = (tmp_path / "cache" / "hot_compile" / "profiles").iterdir()
    kept.write_text("{}")
    torch._dynamo.reset()
    train(net(), 8, {})
    assert set(Profile.load(kept).layers) == {"0", "2"}


def test_explain_tells_what_the_next_step_gets(tmp_path):
    options = {"recipe": "fast", "min_gain": 0, "keep_head": False}
    found = explain(net(), torch.randn(64, 64), options=options)
    assert len(found.graphs) == 1
    assert {str(d.strategy) for d in found.plan} == {"int8"}


def test_without_a_path_the_profile_is_kept_in_the_users_cache(tmp_path):
    train(net(), 8, {})
    (kept,) = (tmp_path / "cache" / "hot_compile" / "profiles").iterdir()
    assert set(Profile.load(kept).layers) == {"0", "2"}
    torch._dynamo.reset()
    _, plans = train(net(), 2, {})
    assert len(plans) == 1
    torch._dynamo.reset()
    train(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), 8, {})
    assert len(list(kept.parent.iterdir())) == 2  # another model is observed on its own


def test_two_graphs_share_one_file(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = net(), net()

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    path = tmp_path / "p.json"
    train(Broken(), 10, {"profile": path})
    profile = Profile.load(path)
    assert set(profile.layers) == {"a.0", "a.2", "b.0", "b.2"}
    assert len(profile.graphs) == 2


def test_forwards_without_backward_do_not_stall_it(tmp_path):
    path = tmp_path / "p.json"
    backend = functools.partial(
        hot, options={**ALWAYS, "profile": path}, inner_compile=run_uncompiled
    )
    compiled = torch.compile(net(), backend=backend)
    for _ in range(20):
        compiled(torch.randn(64, 64))
    assert not path.exists()  # nothing was seen: the static choice stays


def test_lowered_by_inductor_as_in_a_users_run(tmp_path):
    """Whatever is observed, what trains is Inductor's code."""
    options = {
        "min_gain": 0, "keep_head": False, "lqs": "auto", "lqs_warm_up": 1, "lqs_batches": 1,
        "lqs_rechecks": 0, "error_budget": 0.004, "profile": tmp_path / "p.json",
    }  # fmt: skip

    def run():
        torch._dynamo.reset()
        counters.clear()
        model, norms = net()[:1], []
        step, x = torch.compile(model, backend="hot", options=options), torch.randn(64, 64)
        for _ in range(5):
            model.zero_grad()
            step(x).square().mean().backward()
            norms.append(float(model[0].weight.grad.norm()))
        return norms, counters["stats"]["unique_graphs"]

    norms, graphs = run()
    assert graphs == 2  # once to observe, once for good
    assert norms[1] == norms[0]  # an observed step is a usual one
    assert norms[4] != norms[0]
    assert norms[4] == pytest.approx(norms[0], rel=0.05)
    assert run() == ([norms[4]] * 5, 1)


class Logits(nn.Module):
    """Returns its logits, too, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = net(), nn.Linear(64, 128)

    def forward(self, x):
        logits = self.head(F.gelu(self.body(x)))
        return F.cross_entropy(logits, x.argmax(1)), logits


@pytest.mark.parametrize("keep_head", [True, False])
def test_an_output_that_no_loss_depends_on(tmp_path, keep_head, recwarn):
    options = {**ALWAYS, "profile": tmp_path / "p.json", "keep_head": keep_head}
    options |= {"head_min_bytes": 0, "error_budget": 0.004}
    model, reports = Logits(), Reports()
    backend = functools.partial(
        hot, options=options, recorder=reports, inner_compile=run_uncompiled
    )
    compiled = torch.compile(model, backend=backend)
    for _ in range(7):
        loss, logits = compiled(torch.randn(64, 64))
        loss.backward()
        assert logits.requires_grad
    assert set(Profile.load(tmp_path / "p.json").layers) >= {"body.0", "body.2"}
    assert len(reports.graphs) == 2
    assert not [w for w in recwarn if "not observed" in str(w.message)]
