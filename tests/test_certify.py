"""``hot-compile certify``: a script by "hot", looked at, beside stock in turns; what is said."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import eager
from typer.testing import CliRunner

import hot_compile
from hot_compile import certify as certifying
from hot_compile.certify import Session, Turns, certify, choice, verdict
from hot_compile.cli import app
from hot_compile.observing import acceptance
from hot_compile.observing.acceptance import Findings
from hot_compile.observing.certificate import Certificate, Ran
from hot_compile.observing.evidence import Spread
from hot_compile.observing.monitor import Monitor
from hot_compile.record import run_uncompiled

SCRIPT = """
import sys
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.last(self.first(x).relu())

torch.manual_seed(0)
model = MLP()
step = {compiled}
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number in range(int(sys.argv[1])):
    try:
        x = torch.randn(48, 64)
        loss = step(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    except Exception:
        raise SystemExit(9)
print("reached its end")
"""
KINDS = {
    "hot": 'torch.compile(model, backend="hot", options={"min_gain": 0, "keep_head": False})',
    "default": "torch.compile(model)",
    "in place": "model; model.compile()",
}


class Clock:
    """What tells the time: steps take what their code is said to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def taking(self, seconds, run):
        def call(*args):
            self.now += seconds
            return run(*args)

        return call


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where findings are kept."""
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")
    return tmp_path / "accepted"


@pytest.fixture
def costs():
    """Seconds of a step by what is in it; "stock" of one by stock."""
    return {"stock": 0.1, "storage": 0.0, "products": 0.0}


@pytest.fixture(autouse=True)
def node_by_node(monkeypatch, fresh_dynamo, costs):
    """Nothing is lowered, time is as costs say, and the process is put back as it was."""
    by_hot = functools.partial(certifying.hot, inner_compile=run_uncompiled)
    asked, clock = [], Clock()

    def hot(gm, inputs, *, options, **keywords):
        seconds = 0.1 + costs["storage"] * (options.get("memory", "auto") not in ("off", "free"))
        seconds += costs["products"] * ("strategies" not in options)
        return clock.taking(seconds, by_hot(gm, inputs, options=options, **keywords))

    def stock(gm, inputs, *, mode=None, options=None):
        asked.append(options)
        return clock.taking(costs["stock"], eager(gm, inputs))

    monkeypatch.setattr(certifying, "hot", hot)
    monkeypatch.setattr(certifying, "inductor", stock)
    monkeypatch.setattr(certifying, "time", clock)
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, list(value) if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return asked


@pytest.fixture
def script(tmp_path):
    def write(kind="default"):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(compiled=KINDS[kind]))
        return str(path)

    return write


ALWAYS = {"min_gain": 0, "keep_head": False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_looked_at_and_measured_both_ways(script, kind, node_by_node, capsys):
    code, found = certify(script(kind), ["1000"], ALWAYS, steps=4)
    assert code == 0
    assert (found.layers, found.on_integers) == (2, 2)
    assert [look.step for look in found.looks] == [1, 2, 4]
    assert found.errors.worst < 0.25
    assert not found.off
    for ran in (found.hot, found.stock):
        assert ran.steps == 4
        assert 0 < ran.quarters[0] <= ran.seconds <= ran.quarters[1]
        assert ran.peak > 0
    assert len(node_by_node) == 1  # one graph, by stock
    told = capsys.readouterr()
    assert "reached its end" not in told.out
    said = [line for line in told.err.splitlines() if line.startswith("hot: by ")]
    assert [line.split(", ")[0] for line in said] == [
        "hot: by hot",
        "hot: by hot and by stock Inductor in turns",
    ]
    assert (found.hot.seconds, found.stock.seconds) == pytest.approx((0.1, 0.1))
    assert not found.parts


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_allocators(tmp_path):
    """With all that is the script's, parameters and gradients too."""
    path = tmp_path / "train.py"
    text = SCRIPT.format(compiled="model.cuda() and torch.compile(model)")
    text = text.replace("torch.randn(48, 64)", "torch.randn(48, 64, device='cuda')")
    path.write_text(text.replace("64, 96", "64, 9600").replace("96, 64", "9600, 64"))
    code, found = certify(str(path), ["1000"], ALWAYS, steps=4)
    assert code == 0
    gradients_and_parameters = 2 * 4 * (2 * 64 * 9600)
    for ran in (found.hot, found.stock):
        assert gradients_and_parameters < ran.peak < 2**27  # products' workspaces are in it


def test_the_command_prints_a_table_and_a_verdict(script, tmp_path):
    file = tmp_path / "c.json"
    settings = ["--set", "min_gain=0", "--set", "keep_head=False"]
    told = CliRunner().invoke(
        app, ["certify", "--steps", "2", "--json", str(file), *settings, script(), "1000"]
    )
    assert told.exit_code == 0, told.output
    assert "stock Inductor" in told.output
    assert "2 of 2 layers on integers" in " ".join(told.output.split())
    assert "orth it" in told.output.strip().splitlines()[-1]
    found = json.loads(file.read_text())
    assert found["hot"]["steps"] == found["stock"]["steps"] == 2


def test_a_script_that_ends_too_early(script, capsys):
    code, found = certify(script(), ["5"], ALWAYS, steps=4)
    assert code == 0
    assert found.errors is not None
    assert found.hot is None
    assert "ended before enough steps" in verdict(found)
    assert capsys.readouterr().out.count("reached its end") == 1


def test_a_script_that_fails(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('mine')")
    code, found = certify(str(path), [], {}, steps=1)
    assert code == 1
    assert verdict(found) == "No verdict: no gradient could be compared."
    assert "ValueError: mine" in capsys.readouterr().err


def test_looks_go_on_while_something_is_repaired(script):
    """Errors leave the budget: what is timed is what was repaired and looked at again."""
    _, found = certify(script(), ["1000"], ALWAYS, steps=2, budget=1e-4)
    assert found.repaired
    assert found.compiles > 1
    assert max(look.compiles for look in found.looks) == found.compiles
    assert found.hot is not None


def test_steps_of_a_second_optimizer_do_not_count():
    monitor, models = Monitor(), [nn.Linear(2, 2), nn.Linear(2, 2)]
    session = Session(Turns({}, monitor), monitor, 9)
    first, second = (torch.optim.SGD(m.parameters()) for m in models)
    for optimizer in (first, second, second, first):
        session(optimizer)
    assert session.done == 2


LARGE = {"memory_min_bytes": 1, "accept": "auto", **ALWAYS}


def test_what_costs_time_is_found_and_left_out_by_the_next_run(script, costs, kept, capsys):
    """Of parts that are as fast as stock when left out the one of the smallest peak stays out."""
    costs |= {"storage": 0.03}
    code, found = certify(script(), ["1000"], LARGE, steps=6)
    assert code == 0
    assert found.hot.seconds == pytest.approx(0.13)
    assert found.stock.seconds == pytest.approx(0.1)
    without = {name: ran.seconds for name, ran in found.parts.items()}
    assert without["storage"] == without["storage that takes time"] == pytest.approx(0.1)
    assert without["integer products"] == pytest.approx(0.13)
    assert "heads in chunks" not in without
    assert found.left_out.startswith("storage")
    assert "steps of 100 ms for 130 ms (stock 100 ms)" in found.left_out
    (table,) = certifying.parts_tables(found)
    assert table.row_count == len(found.parts)

    (file,) = kept.iterdir()
    assert Findings.load(file).lighter["memory"] in ("off", "free")
    capsys.readouterr()
    code, again = certify(script(), ["1000"], LARGE, steps=2)
    assert again.hot.seconds == pytest.approx(0.1)
    assert not again.parts


def test_explain_and_the_next_run_say_what_is_left_out(script, costs, caplog, monkeypatch):
    costs |= {"products": 0.03}
    kind = KINDS["hot"].replace("}", ', "accept": "auto"}')
    path = Path(script())
    path.write_text(SCRIPT.format(compiled=kind))
    certify(str(path), ["1000"], {}, steps=2)
    torch._dynamo.reset()
    spec = {"__name__": "again"}
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", "0"])
        exec(compile(path.read_text(), str(path), "exec"), spec)
    shown = hot_compile.explain(spec["step"], torch.randn(48, 64))
    assert "as earlier runs found, integer products is left out: steps of 100 ms" in str(shown)
    assert not shown.plan.rewritten
    assert "integer products is left out" in caplog.text
    off = hot_compile.explain(spec["step"], torch.randn(48, 64), options={"accept": "off"})
    assert off.plan.rewritten


def test_parts_that_cost_time_together_are_left_out_together(script, costs):
    costs |= {"storage": 0.03, "products": 0.03}
    _, found = certify(script(), ["1000"], LARGE, steps=6)
    both = found.parts["storage that takes time and storage and integer products"]
    assert both.seconds == pytest.approx(0.1)
    assert " and integer products" in found.left_out


def test_a_budget_of_the_users_stays(script, costs, kept):
    costs |= {"storage": 0.03}
    _, found = certify(script(), ["1000"], {**LARGE, "memory_budget": 0.5}, steps=2)
    assert not any("storage" in name for name in found.parts)
    assert not found.left_out
    assert not list(kept.glob("*"))


def test_nothing_is_remembered_of_who_asked_not_to(script, costs, kept):
    costs |= {"storage": 0.03}
    _, found = certify(script(), ["1000"], {**LARGE, "accept": "off"}, steps=2)
    assert found.hot.seconds > found.stock.seconds
    assert not found.parts
    assert not list(kept.glob("*"))


def ran(seconds, peak, spread=0.001):
    return Ran(seconds, (seconds - spread, seconds + spread), 16, peak)


def of(hot, stock, off=()):
    spread = Spread(0.01, 0.05, "a")
    faults = dict.fromkeys(off, "error 1")
    return Certificate(2, 2, spread, None, None, faults, (), 1, {}, {}, hot, stock)


def test_which_part_is_left_out():
    hot, stock = ran(0.11, 40), ran(0.1, 100)
    fast, lean, slow = ran(0.095, 90), ran(0.1, 50), ran(0.105, 45)
    assert choice({"hot": hot, "stock": stock, "a": fast, "b": lean, "c": slow}) == "b"
    assert choice({"hot": hot, "stock": stock, "c": slow, "d": ran(0.107, 40)}) == "c"
    assert choice({"hot": hot, "stock": stock, "e": ran(0.12, 40)}) is None
    assert choice({"hot": stock, "stock": stock, "b": lean}) is None


@pytest.mark.parametrize(
    ("hot", "stock", "said"),
    [
        (ran(0.100, 40), ran(0.100, 100), "Worth it: 0.40 of stock's peak, no other step time"),
        (ran(0.090, 40), ran(0.100, 100), "Worth it: 0.40 of stock's peak, steps 10% shorter"),
        (ran(0.110, 40), ran(0.100, 100), "Worth it where memory is short: 0.40 of stock's peak"),
        (ran(0.110, 40, 0.05), ran(0.100, 100), "Worth it: 0.40 of stock's peak, no other step"),
        (ran(0.090, 99), ran(0.100, 100), "Worth it: 0.99 of stock's peak, steps 10% shorter"),
        (ran(0.100, 99), ran(0.100, 100), "Not worth it: 0.99"),
        (ran(0.110, 99), ran(0.100, 100), "Not worth it: 0.99 of stock's peak, steps 10% longer"),
        (ran(0.100, 40), None, "No verdict: by stock Inductor the script ended"),
    ],
)
def test_verdicts(hot, stock, said):
    assert verdict(of(hot, stock)).startswith(said)


def test_what_is_longer_in_every_turn_is_told_apart_on_a_busy_machine():
    busy = [0.01, 0.09, 0.02, 0.11, 0.01, 0.05]
    stock = Ran(0.035, (0.01, 0.095), 12, 100, tuple(busy))
    hot = Ran(0.045, (0.02, 0.105), 12, 100, tuple(b + 0.01 for b in busy))
    assert certifying.slower(hot, stock)
    assert "steps 29% longer" in verdict(of(hot, stock))
    assert not certifying.slower(dataclasses.replace(hot, turns=(0.02,) * 6), stock)


def test_nothing_is_worth_it_with_gradients_that_are_off():
    found = of(ran(0.05, 10), ran(0.1, 100), off=["a", "b"])
    assert verdict(found).startswith("Not worth it as it is: 2 gradients are off")
    assert certifying.table(found).row_count == 5
