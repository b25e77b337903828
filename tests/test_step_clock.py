"""What a step takes its GPU and its host, measured while it runs, and what follows from that."""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

import hot_compile
from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.observing import acceptance, gauge, step_clock
from hot_compile.observing.acceptance import Findings
from hot_compile.observing.certificate import _monitor_behind
from hot_compile.observing.step_clock import FIRST, Mark, StepClock
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.plan import Plan
from hot_compile.passes.storage.step_time import SLACK, StepTime

OPTIONS = {"keep_head": False, "accept": "auto"}
STEPS = 20
"""Enough for a clock, where it begins with the fifth."""
WAITS, BUSY = StepTime(0.004, 0.004, True), StepTime(0.009, 0.004, False)
LONG = StepTime(1.0, 0.004, False)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Event:
    """Of a GPU that passes it at some time of its own."""

    def __init__(self, seconds, done=True):
        self.seconds, self.done = seconds, done

    def query(self):
        return self.done

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1e3


def marking(host_takes, gpu_takes, pieces=1, gpu_forward=None, asks=False):
    """Marks of a host and of a GPU that take so long for a step.

    ``gpu_forward``: of the GPU's time; else half of it, as of the host's. ``asks``: before the
    step, and at the end of its last forward, the host asks for a number, and waits for the GPU.
    """
    host, behind = 100.0, 0.0
    ahead = gpu_takes / 2 if gpu_forward is None else gpu_forward
    yield Mark(host, Event(host - 93.0))  # another clock
    while True:
        forward = (host_takes / 2 / pieces, ahead / pieces)
        spans = (0.001, 0.0), *[forward] * pieces, (host_takes / 2, gpu_takes - ahead)
        for place, (seconds, its) in enumerate(spans):
            host += seconds
            behind = max(0.0, behind + its - seconds)
            if asks and place in (0, pieces):
                host, behind = host + behind, 0.0
            yield Mark(host, Event(host + behind - 93.0))


def piece(x):
    """A graph as the clock has it, which gives a tuple."""
    return (_piece(x),)


@functools.partial(torch.compile, backend="aot_eager")
def _piece(x):
    return (x @ torch.ones(4, 4)).sin()


def timed(host, gpu, pieces=1, kinds=None, **how):
    """A step of so many graphs, one behind the other; ``kinds``: of so many that are not alike."""
    marks = marking(host, gpu, pieces, **how)
    clock = StepClock(lambda: next(marks))
    for _ in range(FIRST + 12):
        assert clock.wants_more
        x = torch.ones(4, 4, requires_grad=True)
        for number in range(pieces):
            assert clock.read() is None
            (x,) = clock(piece, [x], number % (kinds or pieces))
        x.sum().backward()
    assert not clock.wants_more
    assert clock.graphs == set(range(kinds or pieces))
    return clock


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_gpu_that_is_as_far_as_its_host_waits_for_it(pieces):
    found = timed(0.006, 0.003, pieces).read()
    assert found.waits
    assert found.host == pytest.approx(0.006)
    assert found.slack == SLACK * found.host
    assert dataclasses.replace(found, share=0.5).slack == SLACK * found.host / 2


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_gpu_that_falls_behind_does_not(pieces):
    found = timed(0.006, 0.009, pieces).read()
    assert not found.waits_for_host
    assert found.device == pytest.approx(0.009, rel=0.2)
    assert found.slack == SLACK * found.device
    assert "measured" in str(found)
    assert "does not wait" in str(found)


def test_a_gpu_that_waits_within_a_step_waits():
    """Its backward ends with more work than the host needs to send it off."""
    assert timed(0.006, 0.0055, gpu_forward=0.001).read().waits_for_host
    assert not timed(0.006, 0.0075, gpu_forward=0.003).read().waits_for_host


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_gpu_that_its_host_waits_for_does_not_wait(pieces):
    """A loss that asks for a number finds the GPU up to date, however long it has kept it busy."""
    found = timed(0.006, 0.040, pieces, asks=True).read()
    assert found.device > 0.030
    assert not found.waits_for_host
    assert timed(0.006, 0.003, pieces, asks=True).read().waits_for_host


@dataclasses.dataclass(eq=False)
class Predicted:
    """What is asked of a gauge."""

    step: StepTime | None


def test_a_graph_that_blocks_share_is_a_part_of_a_step_for_each():
    gauges = [Predicted(None), Predicted(StepTime(3.0, 0.0))]
    clock = timed(0.006, 0.009, 6, kinds=1)
    assert clock.calls(0) == 6
    assert acceptance._share(0, clock) == pytest.approx(1 / 6)

    clock = timed(0.006, 0.009, 6, kinds=2)
    clock.graphs = set(gauges)
    clock.calls = dict(zip(gauges, (3.0, 2.0), strict=True)).__getitem__
    assert acceptance._share(gauges[1], clock) == 1 / 5
    gauges[0].step = StepTime(1.0, 0.0)
    assert acceptance._share(gauges[1], clock) == 3 / 9


def test_a_graph_is_no_more_of_a_step_than_its_forward_tells():
    assert acceptance._share(0, timed(0.006, 0.009)) == 1
    block = timed(0.0006, 0.009, gpu_forward=0.0009)
    assert acceptance._share(0, block) == pytest.approx(0.4, rel=0.1)


def test_it_is_never_waited_for_the_gpu():
    clock = timed(0.006, 0.009)
    clock._spans[-1][-1].event.done = False
    assert clock.read() is None


def test_only_whole_steps_count_and_looks_do_not():
    clock = StepClock(functools.partial(next, marking(1e-3, 1e-3)))

    def step(*usual):
        x = torch.ones(4, 4, requires_grad=True)
        for number, each in enumerate(usual):
            (x,) = clock(piece, [x], number, each)
        assert clock.read() is None
        return x.sum()

    for _ in range(FIRST):
        step(True, True).backward()
    assert not clock._spans
    step(True, False).backward()
    step(False, True).backward()
    assert not clock._spans
    dropped = step(True, True)
    del dropped  # a step without a backward, as one whose loss is not finite
    step(True, True).backward()
    assert len(clock._spans) == 1

    x = torch.ones(4, 4, requires_grad=True)
    again = torch.utils.checkpoint.checkpoint(
        lambda x: clock(piece, clock(piece, [x], 0), 1)[0], x, use_reentrant=False
    )
    again.sum().backward()  # computes both again
    assert len(clock._spans) == 2
    clock.again()
    assert not clock.graphs


def test_what_is_read_between_steps_all_parts_get_to_know():
    clock = timed(0.006, 0.009)
    x = torch.ones(4, 4, requires_grad=True)
    (y,) = clock(piece, [x], 0)
    assert clock.read() is None
    y.sum().backward()
    assert clock.read()
    (y,) = clock(piece, [x], 0)
    assert clock.read()


def test_without_backwards_it_gives_up():
    clock = StepClock(functools.partial(next, marking(1e-3, 1e-3)))
    while clock.wants_more:
        clock(lambda x: (x,), [torch.ones(2)])
    assert clock.vain


class Told(StepClock):
    """A clock that needs no GPU."""

    def __init__(self, told):
        super().__init__(lambda: Mark(0.0, Event(0.0)))
        self._told = told

    def read(self):
        if super().read() is not None:
            self.found = self._told
        return self.found


def test_a_step_tells_more_if_the_gpu_waits_or_takes_much_longer_than_thought():
    short, long = StepTime(0.009, 0.004, False), StepTime(0.02, 0.004, False)
    predicted = StepTime(0.009, 0.004)
    assert not short.tells_more_than(predicted)
    assert long.tells_more_than(predicted)
    assert not dataclasses.replace(long, share=0.5).tells_more_than(predicted)
    assert not short.tells_more_than(StepTime(0.1, 0.004)), "what is stored stays stored"
    assert WAITS.tells_more_than(predicted)
    assert not WAITS.tells_more_than(StepTime(0.001, 0.01))
    assert WAITS.tells_more_than(None)
    assert not long.tells_more_than(None)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path / "accepted")
    return tmp_path / "accepted"


class Broken(nn.Sequential):
    """Each layer is a graph of its own."""

    def forward(self, x):
        x = self[0](x)
        torch._dynamo.graph_break()
        return self[1](x)


def train(found, monkeypatch, steps, broken=False, lasts=0.0, middle=(), slow=8, launch=1e-9):
    """A net whose GPU, one of an H200's rates, is said to have been timed so, one after another."""
    torch._dynamo.reset()
    told = itertools.repeat(found) if isinstance(found, StepTime) else iter(found)
    monkeypatch.setattr(acceptance, "clock_of", lambda devices: Told(next(told)))
    monkeypatch.setattr(acceptance, "LASTS", lasts)
    monkeypatch.setattr(step_clock, "FIRST", 4)
    torch.manual_seed(0)
    reports = Reports()
    layers = nn.Linear(256, 256), *middle, nn.Linear(256, 256)
    model = (Broken if broken else nn.Sequential)(*layers)
    # exact products so slow that integers pay for few rows
    exact = {dtype: rate / slow for dtype, rate in RATES["sm90"].exact.items()}
    rates = dataclasses.replace(RATES["sm90"], launch=launch, exact=exact)
    keywords = {"inner_compile": run_uncompiled, "prices": lambda device: rates}
    step = torch.compile(
        model, backend=functools.partial(hot, options=OPTIONS, recorder=reports, **keywords)
    )
    x = torch.randn(1024, 256)
    for _ in range(steps):
        model.zero_grad()
        step(x).square().mean().backward()
    return step, reports.graphs


def test_a_step_that_waits_is_compiled_once_more_with_fewer_launches(kept, monkeypatch, caplog):
    step, graphs = train(WAITS, monkeypatch, STEPS)
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

    _, (again,) = train([], monkeypatch, STEPS)  # remembered, so it is not timed again
    assert again.digest == after.digest
    assert "known to take" in caplog.text


@pytest.fixture
def train_exact(monkeypatch):
    """The same of exact layers. What a GELU reads is stored in any case, what only a product reads
    where two more kernels are thought to take little."""
    monkeypatch.setitem(OPTIONS, "override", {"*": "exact"})
    monkeypatch.setitem(OPTIONS, "memory_min_bytes", 0)

    def trained(found, steps, middle=None, **keywords):
        middle = (nn.GELU(), nn.Linear(256, 256)) if middle is None else middle
        return train(found, monkeypatch, steps, middle=middle, slow=1, **keywords)

    return trained


def test_a_step_that_waits_without_layers_stays_as_it_is(kept, train_exact, caplog):
    """What is stored, and what is made again, are chosen as before the host was timed."""
    _, (graph,) = train_exact(WAITS, 2 * STEPS)
    assert graph.plan.step.waits is None
    assert "compiled again" not in caplog.text


def test_a_step_that_takes_longer_so_is_compiled_as_it_was(kept, train_exact, caplog):
    slower = dataclasses.replace(LONG, device=1.05 * LONG.device)
    before, after, again = train_exact([LONG, slower], 2 * STEPS)[1]
    assert after.digest != before.digest
    assert again.digest == before.digest
    assert "takes longer: " in caplog.text
    (file,) = kept.iterdir()
    assert Findings.load(file).timed
    assert Findings.load(file).step is None
    _, (again,) = train_exact([], 1)
    assert again.digest == before.digest


def test_a_step_that_takes_no_longer_so_stays(kept, train_exact, caplog):
    _, (_, after) = train_exact([LONG, LONG], 2 * STEPS)
    assert "takes longer" not in caplog.text
    (file,) = kept.iterdir()
    assert Findings.load(file).timed
    assert Findings.load(file).step == LONG
    _, (again,) = train_exact([], 1)
    assert again.digest == after.digest


def test_a_step_that_takes_much_longer_than_predicted_stores_more(kept, train_exact, caplog):
    _, (before, after) = train_exact([LONG] * 2, 2 * STEPS)
    assert "would slow the step down" in str([c.reason for c in before.crossing])
    assert after.held_bytes < before.held_bytes
    assert "(measured): the device does not wait. It is compiled again" in caplog.text


def test_a_step_in_which_nothing_is_rounded_is_timed_too(kept, train_exact, caplog):
    """It was thought to wait for its host, so nothing was stored: there is nothing to look at."""
    step, (graph,) = train_exact(WAITS, 2 * STEPS, (), launch=1.0)
    assert not graph.changed
    found = hot_compile.certificate(step)
    assert (found.looks, found.compiles, found.exact) == ((), 1, 1)
    assert "nothing rounded, so no gradient compared, 0 looks, 1 compile" in str(found)
    assert "Not looked at" not in str(found)

    step, (before, after) = train_exact([LONG] * 2, 2 * STEPS, (), launch=1.0)
    assert not before.changed
    assert after.held_bytes < before.held_bytes
    assert "(measured): the device does not wait. It is compiled again" in caplog.text
    found = hot_compile.certificate(step)
    assert found.exact == 0
    assert found.looks


def test_a_short_run_leaves_that_to_the_next(kept, monkeypatch, caplog):
    """A long one does it when another compile has become little beside what it has lasted."""
    monkeypatch.setattr(gauge, "_AHEAD", 2)
    step, graphs = train(WAITS, monkeypatch, STEPS, lasts=1e9)
    assert len(graphs) == 1
    assert graphs[0].plan.rewritten
    assert "compiled again" not in caplog.text
    (file,) = kept.iterdir()
    assert Findings.load(file).step == WAITS
    assert not Findings.load(file).settled

    monkeypatch.setattr(acceptance, "LASTS", 0.0)
    for _ in range(4):
        step(torch.randn(1024, 256)).square().mean().backward()
    _, after = graphs
    assert not after.plan.rewritten
    assert caplog.text.count("compiled again for that, once") == 1


def test_several_graphs_of_a_step_are_decided_together(kept, monkeypatch, caplog):
    """In one step, once, and with one line."""
    step, graphs = train(WAITS, monkeypatch, STEPS, broken=True)
    assert len(graphs) == 4
    for before, after in zip(graphs[:2], graphs[2:], strict=True):
        assert before.plan.rewritten
        assert not after.plan.rewritten
        assert after.plan.step == dataclasses.replace(WAITS, share=after.plan.step.share)
        assert after.plan.step.share == pytest.approx(0.5, rel=0.3)
    assert caplog.text.count("compiled again for that, once") == 1
    assert str(hot_compile.certificate(step)).count("(measured)") == 1

    train(BUSY, monkeypatch, 1, broken=True)
    assert caplog.text.count("known to take") == 1


def test_what_stays_as_it_is_is_timed_with_what_is_compiled_again(kept, train_exact):
    """Else a step would be compared with a part of one."""
    two = nn.Linear(256, 256), nn.Linear(256, 256)
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), *two)
    faster = dataclasses.replace(LONG, device=0.99 * LONG.device)
    step, graphs = train_exact([LONG, faster], 2 * STEPS, (layers,), broken=True)
    assert len(graphs) == 3
    assert [Findings.load(file).timed for file in kept.iterdir()] == [True, True]
    assert len(_monitor_behind(step)._clock.graphs) == 2
    assert str(hot_compile.certificate(step)).count("(measured)") == 1


@pytest.mark.slow
def test_what_would_come_out_the_same_is_not_compiled_again(kept, monkeypatch, caplog):
    """An exact form at most, and nothing that crosses: what a step takes changes nothing."""
    monkeypatch.setitem(OPTIONS, "override", {"*": "int8"})
    monkeypatch.setitem(OPTIONS, "memory", "off")
    step, graphs = train(WAITS, monkeypatch, STEPS)
    assert len(graphs) == 1
    assert graphs[0].plan.rewritten
    assert "compiled again" not in caplog.text
    assert "(measured): the device waits" in str(hot_compile.certificate(step))
    (file,) = kept.iterdir()
    assert Findings.load(file).timed
    asked = []
    monkeypatch.setattr(acceptance, "clock_of", asked.append)
    train(WAITS, monkeypatch, 1)
    assert asked == []


@pytest.mark.slow
def test_what_is_as_predicted_changes_nothing(kept, monkeypatch):
    step, graphs = train(BUSY, monkeypatch, STEPS)
    assert len(graphs) == 1
    assert list(hot_compile.certificate(step).times.values()) == [BUSY]
    assert all(Findings.load(file).step is None for file in kept.iterdir())


@pytest.mark.slow
def test_a_graph_is_timed_once_however_often_it_is_compiled(kept, monkeypatch):
    """DDP's pieces share their code: when one is compiled again, all are."""
    step, graphs = train(BUSY, monkeypatch, STEPS)
    asked = []
    monkeypatch.setattr(acceptance, "clock_of", asked.append)
    torch._dynamo.reset()
    step(torch.randn(1024, 256)).square().mean().backward()
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
