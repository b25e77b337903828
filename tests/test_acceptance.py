"""On by default: gradients are looked at, what is off is repaired, what was found remembered."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from samples_cancelling import CASES, mlp
from samples_looks import (
    bad_net,
    compiled,
    errors,
    gradients,
    looks_stay_below_a_gpus_peak,
    run_step,
    train_critic,
)
from samples_models import Busy
from torch import nn

import hot_compile
from hot_compile import backend
from hot_compile.inspect import Reports
from hot_compile.observing import acceptance
from hot_compile.observing.acceptance import Acceptance, Findings
from hot_compile.observing.certificate import _monitor_behind
from hot_compile.observing.eager import Eager
from hot_compile.testing import cosine

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where findings are kept; nothing of other tests lies there."""
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")
    return tmp_path / "accepted"


def exact_gradients(model, loss, x, inside):
    """By the exact recipe, which draws the same random numbers."""
    torch._dynamo.reset()
    run_step(*step_of(model, loss, inside, recipe="exact", accept="off"), model, x)
    return gradients(model)


def step_of(model, loss, inside, **options):
    """(what is called, what makes the loss of it)."""
    if inside:
        return compiled(functools.partial(loss, model), **options), lambda f, x: f(x)
    return compiled(model, **options), loss


QUICK = {"pairs by index", "R-Drop", "Pearson", "two towers"}
"""The others: ``-m slow``. Critics and finite differences are what other tests here train."""
SIDES = [
    pytest.param(name, inside, marks=() if name in QUICK and not inside else pytest.mark.slow)
    for name in CASES
    for inside in (False, True)
]


@pytest.mark.parametrize(("name", "inside"), SIDES)
def test_what_nearly_cancels_is_right_by_the_ninth_step(name, inside):
    make, loss, data = CASES[name]
    model, x = make(), data()
    want = exact_gradients(model, loss, x, inside)
    torch._dynamo.reset()
    f, loss = step_of(model, loss, inside)
    for _ in range(9):
        run_step(f, loss, model, x)
    got = gradients(model)
    found = errors(got, want)
    assert max(found.values()) < 0.25, found
    assert min(cosine(got[n], want[n]) for n in found) > 0.97


def test_what_cancels_between_a_steps_backwards():
    """Each has an exact gradient of its own; their sum, which is what is used, had not."""
    torch.manual_seed(0)
    model, x = bad_net()

    def train(f, steps):
        for _ in range(steps):
            model.zero_grad()
            f(x[:512]).mean().backward()
            (-f(x[512:])).mean().backward()
        return gradients(model)

    want = train(model, 1)
    assert max(errors(train(compiled(model, accept="off"), 1), want).values()) > 0.5
    torch._dynamo.reset()
    assert max(errors(train(compiled(model), 9), want).values()) < 0.25


def test_a_look_begins_with_a_step_however_often_it_calls_the_graph():
    """An energy's three forwards nearly cancel; a sum of two of them is off by little."""
    torch.manual_seed(0)
    model, x = mlp(64, 1), torch.randn(512, 64)

    def train(f, steps):
        for _ in range(steps):
            model.zero_grad()
            near = f(x + 0.05 * torch.sin(11 * x))
            (f(x).mean() - near.mean() + 0.1 * f(x).square().mean()).backward()
        return gradients(model)

    want = train(model, 1)
    step = compiled(model)
    assert max(errors(train(step, 9), want).values()) < 0.25
    found = hot_compile.certificate(step)
    assert found.repaired
    assert found.errors.worst < 0.25


def test_the_next_process_starts_with_what_was_found(kept, caplog):
    """One that looks, and one that only remembers."""
    model, x = bad_net()
    want, reports = train_critic(model, model, x, 1), Reports()
    step = compiled(model, reports)
    train_critic(step, model, x, 12)
    assert 2 <= len(reports.graphs) <= 3
    assert _monitor_behind(step).compiles >= 2, "one acceptance however often it is compiled"
    (file,) = kept.iterdir()
    known = json.loads(file.read_text())
    assert known["demoted"] or known["raised"]
    for accept, steps in (("remembered", 1), ("auto", 12)):
        torch._dynamo.reset()
        again = Reports()
        got = train_critic(compiled(model, again, accept=accept), model, x, steps)
        assert [g.digest for g in again.graphs] == [reports.graphs[-1].digest]  # compiled once
        assert max(errors(got, want).values()) < 0.25
    assert "hot-compile profile forget" in caplog.text


def test_what_is_settled_is_not_looked_at_again_soon(kept, monkeypatch):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    looks = []
    own = Eager.gradients
    monkeypatch.setattr(Eager, "gradients", lambda *a: looks.append(1) or own(*a))
    for expected in (5, 1):  # 1, 2, 4, 8 and 64; 64
        torch._dynamo.reset()
        looks.clear()
        model, x = net(), torch.randn(64, 64)
        step = compiled(model)
        for count in range(66):
            model.zero_grad()
            step(x).square().mean().backward()
            if count == 9:
                said = str(hot_compile.certificate(step))
        assert len(looks) == expected
        assert ("looks of an earlier run found nothing" in said) == (expected == 1)
    (file,) = kept.iterdir()
    assert json.loads(file.read_text()) == {
        "demoted": {}, "raised": {}, "stored": {}, "forwards": {}, "settled": True,
        "step": None, "timed": False, "lighter": {}, "because": "",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "[1]", '{"raised": {"a": "7 apples"}}', '{"more": 1}'])
def test_findings_that_cannot_be_read_are_none(tmp_path, text):
    path = tmp_path / "f.json"
    path.write_text(text)
    assert Findings.load(path) == Findings.load(tmp_path / "none") == Findings()


def test_data_that_wander_off_are_seen_by_the_next_look():
    """Rows get a common part, which cancels in the gradient, after looks have become seldom."""
    torch.manual_seed(0)
    model, rows = (
        nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)),
        torch.randn(256, 64),
    )
    reports = Reports()
    step = compiled(model, reports)

    def train(f, apart):
        model.zero_grad()
        y = f(rows + apart)
        (y - y.mean(0)).pow(3).mean().backward()
        return gradients(model)

    for _ in range(64):
        train(step, 0.0)
    assert len(reports.graphs) == 1
    for number in range(65, 516):
        got = train(step, 60.0)
        if number in (511, 515):
            worst = max(errors(got, train(model, 60.0)).values())
            assert (worst > 0.25) == (number == 511), worst
    assert len(reports.graphs) == 2


def test_findings_that_cannot_be_kept_cost_nothing(tmp_path):
    (tmp_path / "file").touch()
    Findings(demoted={"a": "why"}).save(tmp_path / "file" / "f.json")


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_looks_change_no_bit_of_a_step(dropped):
    runs = []
    for accept in ("auto", "off"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Busy(dropped)
        step, seen = compiled(model, accept=accept), []
        for _ in range(4):
            model.zero_grad()
            loss = (step(torch.randn(32, 64)) + step(torch.randn(32, 64))).square().mean()
            loss.backward()
            seen += [loss.detach(), *gradients(model).values()]
        found = certificates(step)
        assert len(found.looks) == (3 if accept == "auto" else 0)
        assert not found.repaired
        assert not found.unseen or accept == "off"
        runs.append([*seen, *(b.clone() for b in model.buffers()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def certificates(step):
    """What is known of a step, whether it is looked at or not."""
    try:
        return hot_compile.certificate(step)
    except TypeError:
        return hot_compile.certificate(Acceptance())


def test_a_certificate_without_a_monitor():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    step, x = compiled(model), torch.randn(256, 64)
    for _ in range(2):
        step(x).square().mean().backward()
    found = hot_compile.certificate(step)
    assert (found.layers, found.on_integers) == (2, 2)
    assert 0 < found.errors.worst < 0.1


def test_a_model_whose_blocks_are_compiled_has_its_certificate_there():
    """They share the first one's code."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2)))
    for block in model:
        block.compile(backend="hot", options={"min_gain": 0, "accept": "auto"})
    for _ in range(2):
        model(torch.randn(256, 64)).square().mean().backward()
    with pytest.raises(TypeError, match="a part that was compiled by itself: '0'"):
        hot_compile.certificate(model)
    assert hot_compile.certificate(model[0]).errors.worst < 0.1


def test_under_autocast_with_a_scaler_and_accumulation():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    step, scaler = compiled(model), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(torch.randn(64, 64)).float().square().mean()
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = hot_compile.certificate(step)
    assert [look.step for look in found.looks] == [2, 4, 6, 10]  # both backwards of a step each
    assert not found.repaired
    assert found.errors.worst < 0.2


def test_several_graphs_and_shapes_that_change():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x):
            x = self.a(x).relu()
            torch._dynamo.graph_break()
            return self.b(x)

    model = Broken()
    step = compiled(model)
    for rows in (32, 48, 64, 48, 80):
        model.zero_grad()
        step(torch.randn(rows, 64)).square().mean().backward()
    found = hot_compile.certificate(step)
    assert found.layers == 2
    assert not found.unseen
    assert not found.repaired


def test_where_nobody_can_look_it_is_said_once(caplog):
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(64, 64)
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        step = compiled(model)
        for rows in (64, 32):
            step(x[:rows]).square().mean().backward()
    told = [r for r in caplog.records if "not compared with exact" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("value", ["off", "remembered"])
def test_switched_off(value, kept):
    model, x = bad_net()
    step = compiled(model, accept=value)
    got = train_critic(step, model, x)
    assert not kept.exists()
    assert max(errors(got, train_critic(model, model, x, 1)).values()) > 0.5


@pytest.mark.parametrize("room", [0.0, 2**40])
def test_a_repair_asks_whether_it_fits(room, monkeypatch, caplog):
    """Where tensors alone are to blame; else nothing is compiled, and that is said once."""
    monkeypatch.setattr(backend, "room", lambda devices: room)
    reports, (model, x) = Reports(), bad_net()
    want = train_critic(model, model, x, 1)
    torch._dynamo.reset()
    step = compiled(model, reports, exclude=["*"], memory="all")
    worst = max(errors(train_critic(step, model, x, 9), want).values())
    said = [r for r in caplog.records if "less exact than wanted" in r.getMessage()]
    assert (len(reports.graphs) == 1) == bool(said) == (room == 0)
    assert len(said) < 2
    assert (worst > 0.25) == (room == 0)


def test_when_looks_are_due():
    monitor = Acceptance()
    assert [n for n in range(1, 5000) if monitor.due(n)] == [1, 2, 4, 8, 64, 512, 4096]
    assert [n for n in range(1, 5000) if monitor.due(n, True)] == [64, 512, 4096]


def test_only_layers_keep_an_8_bit_forward_that_change_the_loss_little(kept):
    """Finite differences of outputs: INT8 products make a loss of 1.8 one of a thousand. Beside
    them a network of which nothing is taken apart."""
    torch.manual_seed(0)
    net, h = mlp(2, 1, nn.Tanh, norm=False, width=128), 1e-2
    fine = mlp(2, 1, nn.Tanh, norm=False, width=128)
    model = nn.ModuleDict({"apart": net, "fine": fine})

    def loss(x):
        sides = [net(x + d) - 2 * net(x) + net(x - d) for d in h * torch.eye(2)]
        return (sum(sides) / h**2 - 1).square().mean() + model["fine"](x).square().mean()

    step, x, off = compiled(loss, forward="int8"), torch.rand(1024, 2), []
    for _ in range(4):
        net.zero_grad()
        fine.zero_grad()
        got = step(x)
        got.backward()
        off.append(float(got.detach() / loss(x).detach()))
    assert off[0] > 10
    assert off[-1] == pytest.approx(1.0, rel=1e-3)
    found = hot_compile.certificate(step)
    left = {n for n, why in found.repaired.items() if why.startswith("exact forward: whole error")}
    assert left == {"2", *(f"2#{n}" for n in range(2, 7))}
    assert found.compiles == 2
    (file,) = kept.glob("*.json")
    assert set(Findings.load(file).forwards) == left


def test_a_sparse_gradient_is_no_reason_to_stop():
    torch.manual_seed(0)
    table, layer = nn.Embedding(1000, 64, sparse=True), nn.Linear(64, 64)
    step, ids = compiled(lambda i: layer(table(i)).square().mean()), torch.randint(1000, (512,))
    for _ in range(2):
        step(ids).backward()
    assert table.weight.grad.is_sparse
    found = hot_compile.certificate(step)
    assert found.unseen.keys() == {"table.weight"}
    assert "sparse" in found.unseen["table.weight"]
    assert found.looks[0].errors.worst < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looks_do_not_raise_a_gpus_peak(dtype):
    """An exact step takes twice as much: it is cut into stretches."""

    def make(accept):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, F.gelu, batch_first=True)
        model = nn.TransformerEncoder(layer, 8).cuda()
        step = compiled(model, lower=True, accept=accept)

        def forward():
            x, target = torch.randn(2, 64, 128, 512, device="cuda")
            return F.mse_loss(step(x).float(), target)

        return model, step, forward

    looks_stay_below_a_gpus_peak(make, dtype)


@pytest.mark.gpu
def test_a_full_gpu_trains_and_is_told_of():
    """No memory is left for a look: it is skipped."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    step, x = compiled(model, lower=True, accept="auto"), torch.randn(2**14, 2048, device="cuda")
    step(x).square().mean().backward()
    held = torch.empty(int(0.97 * torch.cuda.mem_get_info()[0]), dtype=torch.int8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(8):
        model.zero_grad()
        step(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    del held
