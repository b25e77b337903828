"""What a step takes its GPU and its host, measured while it runs, and what follows from that."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import hot_compile
from hot_compile import backend
from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.observing import acceptance
from hot_compile.observing.acceptance import Findings
from hot_compile.observing.step_clock import FIRST, Mark, StepClock
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.plan import Plan
from hot_compile.passes.storage.step_time import SLACK, StepTime

OPTIONS = {"keep_head": False, "accept": "auto"}
WAITS, BUSY = StepTime(0.004, 0.004, True), StepTime(0.009, 0.004, False)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Event:
    """Of a GPU that passes it at some time of its own."""

    def __init__(self, seconds, done=True):
        self.seconds, self.done = seconds, done

    def query(self):
        return self.done

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1e3


def marking(forward, backward, gpu):
    """Marks of a host that takes so long for a forward and a backward, and of a GPU for both."""
    host, behind = 100.0, 0.0
    yield Mark(host, Event(host - 93.0))  # another clock
    while True:
        for seconds, its in ((0.0, 0.0), (forward, gpu / 3), (0.001, 0.0), (backward, gpu * 2 / 3)):
            host += seconds
            behind = max(0.0, behind + its - seconds)
            yield Mark(host, Event(host + behind - 93.0))


def timed(forward, backward, gpu, steps=20):
    marks = marking(forward, backward, gpu)
    clock, weight = StepClock(lambda: next(marks)), torch.ones(4, 4, requires_grad=True)
    run = torch.compile(lambda x: (x @ weight).sum(), backend="aot_eager")
    for _ in range(steps):
        if clock.wants_more:
            clock(lambda *a: (run(a[0]),), [torch.ones(4, 4, requires_grad=True)])[0].backward()
    assert not clock.wants_more
    return clock


def test_a_gpu_that_is_as_far_as_its_host_waits_for_it():
    found = timed(0.002, 0.004, gpu=0.003).read()
    assert found.waits
    assert found.host == pytest.approx(0.006)
    assert found.slack == SLACK * found.host


def test_a_gpu_that_falls_behind_does_not():
    found = timed(0.002, 0.004, gpu=0.009).read()
    assert not found.waits_for_host
    assert found.device == pytest.approx(0.009, rel=0.2)
    assert found.slack == SLACK * found.device
    assert "measured" in str(found)
    assert "does not wait" in str(found)


def test_it_is_never_waited_for_the_gpu():
    clock = timed(0.002, 0.004, gpu=0.009)
    clock._spans[-1][3].event.done = False
    assert clock.read() is None


def test_without_backwards_it_gives_up():
    marks = marking(1e-3, 1e-3, 1e-3)
    clock = StepClock(lambda: next(marks))
    while clock.wants_more:
        clock(lambda x: (x,), [torch.ones(2)])
    assert clock.vain


class Told(StepClock):
    """A clock that needs no GPU."""

    def __init__(self, found):
        super().__init__(lambda: Mark(0.0, Event(0.0)))
        self._found = found

    def read(self):
        return self._found


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")
    return tmp_path / "accepted"


def train(found, monkeypatch, steps):
    """A net whose GPU, one of an H200's rates, is said to have been timed so."""
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "clock_of", lambda devices: Told(found))
    torch.manual_seed(0)
    reports = Reports()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    rates = dataclasses.replace(RATES["sm90"], launch=1e-9)
    keywords = {"inner_compile": run_uncompiled, "prices": lambda device: rates}
    step = torch.compile(
        model, backend=functools.partial(hot, options=OPTIONS, recorder=reports, **keywords)
    )
    x = torch.randn(8192, 256)
    for _ in range(steps):
        model.zero_grad()
        step(x).square().mean().backward()
    return step, reports.graphs


def test_a_step_that_waits_is_compiled_once_more_with_fewer_launches(kept, monkeypatch, caplog):
    step, graphs = train(WAITS, monkeypatch, FIRST + 16)
    before, after = graphs
    assert before.plan.rewritten
    assert not before.plan.step.waits_for_host
    assert not after.plan.rewritten
    assert after.plan.step == WAITS
    assert "by launches alone" in after.plan.rates[0]
    assert "compiled again for that, once" in caplog.text
    assert "(measured): the device waits" in str(hot_compile.certificate(step))
    (file,) = kept.iterdir()
    assert Findings.load(file).step == WAITS

    _, (again,) = train(BUSY, monkeypatch, FIRST + 16)  # remembered, so it is not timed again
    assert again.digest == after.digest
    assert "known to take" in caplog.text


def test_what_is_as_predicted_changes_nothing(kept, monkeypatch):
    step, graphs = train(BUSY, monkeypatch, FIRST + 16)
    assert len(graphs) == 1
    assert list(hot_compile.certificate(step).times.values()) == [BUSY]
    assert all(Findings.load(file).step is None for file in kept.iterdir())


def test_a_graph_is_timed_once_however_often_it_is_compiled(kept, monkeypatch):
    """DDP's pieces share their code: when one is compiled again, all are."""
    step, graphs = train(BUSY, monkeypatch, FIRST + 16)
    asked = []
    monkeypatch.setattr(backend, "clock_of", asked.append)
    torch._dynamo.reset()
    step(torch.randn(8192, 256)).square().mean().backward()
    assert len(graphs) == 2
    assert not asked


def test_a_plan_tells_of_the_step_in_json():
    assert Plan("hot", (), step=BUSY).to_json()["step"] == dataclasses.asdict(BUSY)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "waits"), [(64, True), (4096, False)])
def test_on_a_gpu(width, waits, kept):
    """Layers too small to fill it leave a GPU waiting, large ones do not."""
    torch.manual_seed(0)
    parts = [part for _ in range(24) for part in (nn.Linear(width, width), nn.GELU())]
    model, x = nn.Sequential(*parts).cuda(), torch.randn(4 * width, width, device="cuda")
    step = torch.compile(model, backend="hot", options={"min_gain": 0, "accept": "auto"})
    for number in range(FIRST + 20):
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(x).float().square().mean()
        loss.backward()
        if number == FIRST + 18:
            torch.cuda.synchronize()
    (found,) = hot_compile.certificate(step).times.values()
    assert found.waits is waits
    assert found.host > 0
    assert found.device > 0
