"""A monitor gives tensors more bits whose storing makes a gradient leave its budget."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hot_compile
from hot_compile import calibrate, calibration
from hot_compile.accounting import Measured, MemoryReport
from hot_compile.backend import hot
from hot_compile.config import UNCOMPRESSED, HotConfig
from hot_compile.errors import OptionError
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.observing.gauge import Gauge
from hot_compile.observing.raising import (
    Stored,
    amplification,
    asked_in,
    costliest,
    exact_products,
    raised_bits,
    strategy_in,
)
from hot_compile.passes.measure.stored import Fed
from hot_compile.passes.profile.profile import StorageMeasure
from hot_compile.testing import cosine

ALWAYS = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 1024}
BUDGET = 0.28
SICK = "1:addmm"
LARGE = 2e5
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mlp(nn.Module):
    """A residual block of which some channels can be made to stand out."""

    def __init__(self, width=128):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))

    def outliers(self, size=LARGE):
        """A few channels become large, and the next layer scales them back."""
        with torch.no_grad():
            self.fc1.bias[5::64] = size
            self.fc2.weight[:, 5::64] /= size


def net():
    """One tensor crosses that can be stored in few bits: what the GELU reads."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    x, target = torch.randn(256, 128), torch.randn(256, 128)

    def outliers():
        with torch.no_grad():
            model[1].bias[5::64] = 5e5
            model[3].weight[:, 5::64] /= 5e5

    return model, lambda run: (run(x) * target).mean(), outliers


def blocks():
    model = nn.Sequential(Mlp(), Mlp())
    x, target = torch.randn(4, 64, 128), torch.randn(4, 64, 128)
    return model, lambda run: (run(x) * target).mean()


def test_the_worst_forwards_are_left_exact_until_the_rest_is_small_enough():
    lost = {"a": 1.0, "b": 6.0, "c": 3.0}
    assert costliest(lost, 1.0) == []
    assert costliest(lost, 0.4) == ["b"]
    assert costliest(lost, 0.39) == ["b", "c"]
    assert costliest(lost, 0.0) == ["b", "c", "a"]
    assert costliest({}, 0.0) == []


class Run:
    """Training of a model under a monitor, and all that it told."""

    def __init__(self, model, loss, monitor=None, lower=False, **options):
        self.model, self.loss, self.reports, self.seen = model, loss, Reports(), []
        self.monitor = monitor or hot_compile.Monitor(every=2, budget=BUDGET, rotate=1)
        self.monitor.callback = lambda _, found: self.seen.append(found)
        keywords = {} if lower else {"inner_compile": run_uncompiled}
        options = {**ALWAYS, "monitor": self.monitor, **options}
        backend = functools.partial(hot, options=options, recorder=self.reports, **keywords)
        self.compiled = torch.compile(model, backend=backend)

    def steps(self, count):
        for _ in range(count):
            self.model.zero_grad()
            self.loss(self.compiled).backward()
        return self

    @property
    def kept(self):
        """The largest crossing tensor of each module, in the code that runs now."""
        return {c.module: c for c in reversed(self.reports.graphs[-1].crossing)}

    @property
    def worst(self):
        """The largest whole error of a layer's weight in the last watched step."""
        last = self.seen[-1]
        return max(sides["weight.grad"].error for sides in last.values() if "weight.grad" in sides)


def drifting_data():
    """Channel 0 begins to say something, and units that read nothing else become large."""
    model, _ = blocks()
    x, target = torch.randn(4, 64, 128), torch.randn(4, 64, 128)
    x[..., 0] = x[..., 1:].mean(-1)  # what a norm makes zero of
    with torch.no_grad():
        first = model[0]
        first.fc1.weight[:, 0] = 0.0
        first.fc1.weight[5::64, 0] = LARGE
        first.fc2.weight[:, 5::64] /= LARGE
    return model, lambda run: (run(x) * target).mean(), lambda: x[..., 0].add_(2.0)


def test_an_outlier_that_appears_in_training_raises_its_own_tensor_only():
    model, loss = blocks()
    run = Run(model, loss).steps(6)
    assert run.worst < BUDGET
    assert not run.monitor.raised
    before = run.kept
    model[1].outliers()
    run.steps(8)
    assert set(run.monitor.raised) == {"1.fc1:addmm"}
    why = run.monitor.raised["1.fc1:addmm"]
    assert why.startswith("8 bits: error ")
    assert "as groups6; whole error of 1.fc1.weight" in why
    assert not run.monitor.stored
    assert not run.monitor.demoted
    assert run.worst < BUDGET
    assert len(run.reports.graphs) == 2
    assert run.kept["1.fc1"].scheme == "rows8"
    assert {n: c.scheme for n, c in run.kept.items() if n != "1.fc1"} == {
        n: c.scheme for n, c in before.items() if n != "1.fc1"
    }


def test_the_reason_is_reported(caplog, tmp_path):
    model, loss, change = net()
    change()
    path = tmp_path / "quality.jsonl"
    run = Run(model, loss, hot_compile.Monitor(2, BUDGET, 1, path)).steps(5)
    reason = run.kept["1"].reason
    assert reason == f"monitor: {run.monitor.raised[SICK]}"
    report = MemoryReport(run.reports.graphs[-1].crossing, {"exact": Measured(1, 0, 1)})
    assert "monitor: 6 bits around the batch's mean" in reason
    assert "monitor: 6 bits around the" in str(report)
    assert f"hot: {SICK} is stored more finely from now on: 6 bits around" in caplog.text
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["stored" in line for line in lines] == [False, True]  # the next step was looked at
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[1]["stored"][SICK]["scheme"] == "groups6"
    assert lines[1]["stored"][SICK]["errors"]["groups6"]["error"] > BUDGET


def test_what_is_fine_changes_nothing_and_shows_no_stored_tensor(monkeypatch):
    monkeypatch.setattr(Gauge, "stored", lambda *_: pytest.fail("looked at without a doubt"))
    model, loss, _ = net()
    run = Run(model, loss).steps(12)
    assert len(run.seen) == 5
    assert len(run.reports.graphs) == 1
    assert not any((run.monitor.raised, run.monitor.stored, run.monitor.demoted))


def test_without_a_budget_it_only_watches():
    model, loss, change = net()
    change()
    run = Run(model, loss, hot_compile.Monitor(every=2, rotate=1)).steps(8)
    assert run.worst > BUDGET
    assert len(run.reports.graphs) == 1
    assert not run.monitor.raised


@pytest.mark.parametrize("budget", [pytest.param(0.03, marks=pytest.mark.slow), 1e-3])
def test_it_ends(budget):
    """However small the budget: each tensor rises at most once a scheme, and then all is exact."""
    model, loss, _ = net()
    options = {"override": {"*": "exact"}, "memory_bits": 4}
    run = Run(model, loss, hot_compile.Monitor(1, budget, 1), **options).steps(24)
    graphs = len(run.reports.graphs)
    assert run.monitor.raised
    assert run.worst < budget
    run.steps(6)
    assert len(run.reports.graphs) == graphs <= 6


def test_layers_and_tensors_are_repaired_in_one_compile():
    """Its own strategy and storage both leave the budget."""
    model, loss, change = net()
    change()
    run = Run(model, loss, hot_compile.Monitor(every=3, budget=1e-4, rotate=1)).steps(6)
    assert set(run.monitor.demoted) == {"1", "3"}
    assert SICK in run.monitor.raised
    assert len(run.reports.graphs) == run.monitor.compiles == 2


def test_an_error_that_no_tensor_makes_takes_the_rungs(monkeypatch):
    """Nothing that crosses can be measured: then storage is changed in the whole graph."""

    def too_short(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Fed, "errors", too_short)
    model, loss, change = net()
    change()
    run = Run(model, loss).steps(10)
    assert not run.monitor.raised
    assert run.monitor.stored["1"].startswith("stores activations in 8 bits: whole error")
    assert run.worst < BUDGET


def test_a_new_monitor_starts_with_what_another_found():
    model, loss, change = net()
    change()
    first = Run(model, loss).steps(6)
    saved = json.loads(json.dumps(first.monitor.raised))  # as a checkpoint has it
    torch._dynamo.reset()
    again = Run(model, loss, hot_compile.Monitor(2, BUDGET, 1, raised=saved)).steps(6)
    assert len(again.reports.graphs) == 1
    assert again.kept["1"].scheme == "around6"
    assert again.kept["1"].reason == f"monitor: {saved[SICK]}"
    assert again.worst < BUDGET
    options = {**ALWAYS, "monitor": again.monitor}
    told = hot_compile.explain(model, torch.randn(256, 128), options=options)
    assert "1 (addmm) is stored as around6: monitor: 6 bits around the batch's mean: error" in str(
        told
    )


def test_a_profile_that_has_become_wrong_is_corrected(monkeypatch, tmp_path):
    """Measured early, 4 bits were enough."""
    model, loss, change = net()
    monkeypatch.setattr(calibration, "hot", functools.partial(hot, inner_compile=run_uncompiled))
    found = calibrate(model, [0], lambda m, _: loss(m), options=ALWAYS, progress=False)
    found.save(tmp_path / "p.json")
    run = Run(model, loss, profile=tmp_path / "p.json").steps(4)
    assert run.kept["1"].scheme == "int4"
    change()
    run.steps(8)
    assert run.kept["1"].scheme == "around6"
    assert "monitor: 6 bits around" in run.kept["1"].reason
    assert run.worst < BUDGET


def test_data_that_drift_raise_the_tensor_that_sees_them():
    model, loss, change = drifting_data()
    run = Run(model, loss, override={"0.fc1": "exact"}).steps(6)
    assert run.worst < BUDGET
    change()
    run.steps(8)
    assert set(run.monitor.raised) == {"0.fc1:addmm"}
    assert run.worst < BUDGET


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": 0.25},
        {"recompute": False},
    ],
)
def test_beside_other_options(options):
    model, loss, change = net()
    change()
    run = Run(model, loss, **options).steps(9)
    assert set(run.monitor.raised) == {SICK}
    assert run.worst < BUDGET


@pytest.mark.slow
def test_compiled_by_inductor():
    model, loss, change = net()
    run = Run(model, loss, lower=True).steps(4)
    change()
    run.steps(8)
    assert set(run.monitor.raised) == {SICK}
    assert run.worst < BUDGET


def columns(kind):
    """Columns a hundred deviations off, or one of years, in front of a batch norm."""
    x = torch.randn(256, 32)
    if kind == "years":
        x[:, 0] = 2000 + 10 * x[:, 0]
    else:
        x += 100.0 * torch.ones(32).copysign(torch.randn(32))
    widths = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU())
    model, y = nn.Sequential(*widths, nn.Linear(48, 10)), torch.randint(10, (256,))
    return model, lambda run: F.cross_entropy(run(x), y)


def differences(_):
    """Second differences of one network, side by side in a batch."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model.append(nn.Linear(64, 1))
    x = torch.randn(256, 8)
    batch = torch.cat([x + 0.05, x, x - 0.05])

    def loss(run):
        before, middle, behind = run(batch).chunk(3)
        return ((before - 2 * middle + behind) / 0.05**2 - 1).square().mean()

    return model, loss


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (columns, "hundred"),
        pytest.param(columns, "years", marks=pytest.mark.slow),
        (differences, ""),
    ],
)
def test_gradients_that_cancel_are_right_after_one_repair(make, kind):
    torch.manual_seed(1)
    model, loss = make(kind)
    loss(model).backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.dim() > 1}
    run = Run(model, loss, hot_compile.Monitor(budget=0.25, rotate=1), memory_min_bytes=0)
    run.steps(1)
    before = min(cosine(model.get_parameter(n).grad, g) for n, g in want.items())
    run.steps(4)
    after = {n: cosine(model.get_parameter(n).grad, g) for n, g in want.items()}
    assert before < 0.8 < 0.98 < min(after.values()), after
    assert len(run.reports.graphs) == 2
    crossing = run.reports.graphs[-1].crossing
    assert sum(c.bytes for c in crossing) < 0.5 * sum(c.bytes_before for c in crossing)


class Sharp(nn.Module):
    """Attention whose logits are in the hundreds: few rows have a gradient, and they depend on the
    last digits of queries and keys."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        with torch.no_grad():
            self.norm.bias[3] += 100

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(8 * q, 8 * k, v)[:, 0])


def test_queries_that_want_more_than_the_finest_bits_become_exact():
    """By 12 bits their gradients are wholly wrong, and by their own rounding they are not: that
    tells them from what is zero but for rounding."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), Sharp()), torch.randn(8, 16, 32)
    target = torch.randn_like(x)
    run = Run(model, lambda f: (f(x) * target).mean(), memory_min_bytes=0).steps(8)
    assert run.worst < 0.05
    assert not run.monitor.demoted
    assert {why.split(":")[0] for why in run.monitor.raised.values()} == {"exact"}


def test_what_is_passed_on_counts_more_where_gradients_cancel():
    """A g_w that loses fifty times what is usual loses that much of errors in g_y, too."""
    errors = {"groups12": StorageMeasure(0.001, 0.0002), "rows8": StorageMeasure(0.01, 0.02)}
    seen = {"x": Stored("rows8", errors)}
    assert amplification({}) == amplification({"fc": 0.009}) == 1.0
    assert amplification({"fc": 0.5, "head": 0.01}) == 50.0
    assert not raised_bits(seen, 0.2, {})
    assert raised_bits(seen, 0.2, {}, 50.0)["x"].startswith("12 bits: error 0.01")


@pytest.mark.parametrize(
    ("off", "before", "text", "strategy"),
    [
        ({"g_w": 0.5}, None, "g_w: error 0.5", "gx-only"),
        ({"g_x": 0.5}, None, "g_x: error 0.5", "gw-only"),
        ({"g_x": 0.5, "g_w": 0.7}, None, "error 0.7", "exact"),
        ({"g_x": 0.5}, "g_w: error 0.4 over", "error 0.5", "exact"),
    ],
)
def test_the_product_that_is_off_is_exact_alone(off, before, text, strategy):
    assert exact_products(off, before) == text
    assert strategy_in(text) == strategy


ERRORS = {
    "rows8": StorageMeasure(0.01, 0.001),
    "groups6": StorageMeasure(0.05, 0.04),
    "int4": StorageMeasure(0.9, 0.8),
}


def test_the_offer_of_fewest_bytes_is_taken():
    """One that is finer in what matters may take less than one of more bits."""
    errors = {
        "groups12": StorageMeasure(0.001, 0.0),
        "rows8": StorageMeasure(0.05, 0.0),
        "around6": StorageMeasure(0.04, 0.0),
        "groups6": StorageMeasure(0.9, 0.0),
    }
    sizes = {"groups12": 1200, "rows8": 800, "around6": 700, "groups6": 600}
    now = Stored("groups6", errors, sizes)
    assert now.offer(0.2) == "6 bits around the batch's mean"
    assert Stored("groups6", errors, {**sizes, "around6": 1100}).offer(0.2) == "8 bits"
    assert now.offer(0.01) == "12 bits"
    assert now.offer(1e-4) == "exact"
    assert Stored("rows8", errors, sizes).offer(0.06) == "6 bits around the batch's mean"
    raised = Stored("around6", errors, sizes).offer(0.01, "6 bits around the batch's mean: why")
    assert raised == "12 bits"


@pytest.mark.parametrize(
    ("scheme", "budget", "known", "bits"),
    [
        ("int4", 0.2, {}, 6),
        ("int4", 0.1, {}, 8),  # 6 bits would be too few as well
        ("groups6", 0.1, {}, 8),
        ("rows8", 0.01, {}, UNCOMPRESSED),
        ("groups6", 0.2, {}, None),  # within
        ("exact", 1e-9, {}, None),
        ("int4", 0.2, {"x": "8 bits: why"}, None),  # raised before: something else is wrong
        ("rows8", 0.01, {"x": "exact: why"}, None),
        ("int4", 0.1, {"x": "6 bits: why"}, 8),
        ("rows8", 0.01, {"x": "8 bits: why"}, UNCOMPRESSED),
    ],
)
def test_bits_are_the_fewest_that_stay_within_the_share(scheme, budget, known, bits):
    found = raised_bits({"x": Stored(scheme, ERRORS)}, budget, known)
    assert [asked_in(text) for text in found.values()] == ([] if bits is None else [bits])


@pytest.mark.parametrize("raised", [["x"], {"x": "finer"}, {"x": 8}, {"x": ""}])
def test_entries_that_do_not_fit_are_refused(raised):
    with pytest.raises(OptionError, match="raised"):
        hot_compile.Monitor(raised=raised)


def test_the_last_glob_that_matches_counts():
    config = HotConfig.from_options({"memory_override": {"blocks.*": 8, "blocks.1.*": "exact"}})
    assert config.asked_of("blocks.0.fc1:addmm") == 8
    assert config.asked_of("blocks.1.fc1:addmm:1") == UNCOMPRESSED
    assert config.asked_of("head:addmm") is None
    named = HotConfig.from_options({"memory_override": {"head": 8, "fc:addmm": 12}})
    assert named.asked_of("head:addmm") == 8
    assert [named.asked_of(f"fc:{op}") for op in ("addmm", "gelu")] == [12, None]


@pytest.mark.parametrize(
    ("override", "scheme"),
    [({"1": 8}, "rows8"), ({"1:addmm": "exact"}, "exact"), ({"*": 6}, "groups6")],
)
def test_bits_of_one_tensor_by_option(override, scheme):
    model, loss, _ = net()
    kept = Run(model, loss, memory_override=override).steps(1).kept
    assert kept["1"].scheme == scheme
    assert kept["1"].reason == ("" if scheme == "groups6" else "memory_override")
