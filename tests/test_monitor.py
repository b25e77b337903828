"""Watching gradient quality: what is reported, where to, and demotion of a layer that fails."""

import contextlib
import functools
import json

import pytest
import torch
import torch.nn.functional as F
from samples_models import Busy
from torch import nn

import hot_compile
from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.errors import OptionError
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.memory import peak_bytes
from hot_compile.observing import watching
from hot_compile.observing.acceptance import Acceptance
from hot_compile.observing.gauge import Gauge, Watched
from hot_compile.observing.monitor import Monitor, Quality
from hot_compile.testing import cosine, hot_step

ALWAYS = {"min_gain": 0, "keep_head": False}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def net():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def compiled(model, monitor, reports=None, lower=False, **options):
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    options = {**ALWAYS, "monitor": monitor, **options}
    return torch.compile(
        model, backend=functools.partial(hot, options=options, recorder=reports, **keywords)
    )


def test_reports_the_layers_own_strategy_every_n_steps(tmp_path):
    seen, path = {}, tmp_path / "q.jsonl"

    class Writer:
        def __init__(self):
            self.scalars = []

        def add_scalar(self, name, value, step):
            self.scalars.append((name, value, step))

    writer = Writer()
    monitor = hot_compile.Monitor(3, None, 1, path, writer, callback=seen.__setitem__)
    model, x = net(), torch.randn(64, 64)
    step = compiled(model, monitor, lower=True)
    for _ in range(8):
        model.zero_grad()
        step(x).square().mean().backward()
    assert sorted(seen) == [3, 6]
    assert set(seen[3]) == {"0", "2", "0.bias", "2.bias"}
    assert set(seen[3]["2"]) == {"g_x", "g_w", "weight.grad"}
    assert set(seen[3]["0.bias"]) == {"grad"}
    assert seen[3]["2"]["g_x"].snr > 30
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[0]["layers"]["2"]["g_w"]["error"] == seen[3]["2"]["g_w"].error
    assert ("hot/g_w cosine/2", seen[3]["2"]["g_w"].cosine, 3) in writer.scalars
    model.zero_grad()
    model(x).square().mean().backward()
    exact = model[2].weight.grad.clone()
    model.zero_grad()
    options = {**ALWAYS, "recompute": False, "memory": "off"}
    hot_step(lambda x: model(x).square().mean(), x, options=options)
    assert cosine(model[2].weight.grad, exact) == pytest.approx(
        seen[3]["2"]["g_w"].cosine, abs=1e-3
    )
    assert not monitor.demoted


def test_a_layer_that_leaves_its_budget_is_demoted_without_a_crash():
    """Outliers in a few rows that matter little to the loss, a lot to a group's INT4 scale."""
    monitor, reports = hot_compile.Monitor(every=2, budget=0.3, rotate=1), Reports()
    model, weights = net(), torch.ones(256, 1)
    weights[::16] = 1e-6
    step = compiled(model, monitor, reports)
    losses = []
    for number in range(12):
        x = torch.randn(256, 64)
        if number >= 4:
            x[::16] *= 300
        loss = (step(x).square() * weights).mean()
        loss.backward()
        losses.append(loss.item())
    assert "0" in monitor.demoted
    assert monitor.demoted["0"].startswith("g_w: error")
    assert "over budget 0.3 at step" in monitor.demoted["0"]
    last = reports.graphs[-1].plan
    assert last["0"].strategy == "gx-only"  # the product that is off is exact, the other is not
    assert last["0"].way == "INT8 g_x"
    assert len(losses) == 12
    assert len(reports.graphs) <= 2 * (1 + len(monitor.demoted))


def test_a_failing_callback_does_not_stop_training(caplog):
    def fail(step, found):
        raise RuntimeError("user's bug")

    model, x = net(), torch.randn(64, 64)
    step = compiled(model, hot_compile.Monitor(every=1, callback=fail))
    for _ in range(3):
        step(x).square().mean().backward()
    assert "could not report step" in caplog.text


def test_non_finite_gradients_are_left_out():
    seen = []
    model, x = net(), torch.randn(64, 64)
    monitor = hot_compile.Monitor(every=1, budget=0.3, rotate=1, callback=lambda *a: seen.append(a))
    step = compiled(model, monitor)
    for scale in (float("inf"), 1.0, 1.0):
        (step(x).square().mean() * scale).backward()
    assert len(seen) == 1
    assert not monitor.demoted


@pytest.mark.parametrize("rotate", [2, 4])  # 4: more than there are layers
def test_layers_take_turns(rotate):
    seen, model, x = {}, net(), torch.randn(64, 64)
    step = compiled(model, hot_compile.Monitor(every=1, rotate=rotate, callback=seen.__setitem__))
    for _ in range(5):
        step(x).square().mean().backward()
    own = {n: {layer for layer, sides in seen[n].items() if "g_w" in sides} for n in (1, 2, 3, 4)}
    assert [len(layers) for layers in own.values()] == [1, 1, 1, 1]
    assert own[1] | own[2] == {"0", "2"}
    assert own[1] == own[3]
    assert all("weight.grad" in seen[n][layer] for n in seen for layer in ("0", "2"))


@pytest.mark.parametrize(
    ("every", "due"),
    [(100, [100, 200, 300]), ("doubling", [1, 2, 4, 8, 16, 32, 64, 128, 192, 256])],
)
def test_which_forwards_are_watched(every, due):
    calls, gauge = [], Gauge(1)

    def observed():
        calls.append("observed")
        gauge.gradient("p", torch.ones(2), torch.ones(2))  # as its backward would

    observed.check_outputs = lambda: None
    observed.telling = contextlib.nullcontext
    watched = Watched(lambda: calls.append("usual"), observed, gauge, Monitor(every=every))
    for _ in range(300):
        watched()
    assert [n for n, call in enumerate(calls, 1) if call == "observed"] == due


def test_forwards_of_a_step_are_watched_until_its_backward_and_judged_as_a_sum():
    """A critic: each forward's gradient is right to a percent, their difference is not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(net(), nn.GELU(), nn.Linear(64, 1)), torch.randn(256, 64)
    monitor = Monitor(budget=0.25)
    step = compiled(model, monitor)
    (step(x).mean() - step(x + 0.01 * torch.randn(256, 64)).mean()).backward()
    assert hot_compile.certificate(step).errors.worst > 0.5
    for _ in range(6):
        model.zero_grad()
        (step(x).mean() - step(x + 0.01 * torch.randn(256, 64)).mean()).backward()
    assert hot_compile.certificate(monitor).errors.worst < 0.25
    assert monitor.compiles <= 3


def test_with_auto(tmp_path):
    seen = {}
    model, x = net(), torch.randn(64, 64)
    options = {"lqs": "auto", "lqs_warm_up": 1, "lqs_batches": 1, "profile": tmp_path / "p.json"}
    step = compiled(model, hot_compile.Monitor(every=2, callback=seen.__setitem__), **options)
    for _ in range(8):
        step(x).square().mean().backward()
    assert seen


def test_qualities():
    assert Quality(0.1, 1.0).snr == pytest.approx(20)
    assert Quality(0.0, 1.0).snr == float("inf")


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_bad_monitors_are_refused(every):
    for name in ("every", "rotate"):
        with pytest.raises(OptionError, match="whole number"):
            hot_compile.Monitor(**{name: every})
    with pytest.raises(OptionError, match="Monitor"):
        hot(torch.fx.symbolic_trace(net()), [], options={"monitor": every})


def whole(found):
    """{layer or parameter: its gradient's quality in the whole step}."""
    return {n: q for n, sides in found.items() for side, q in sides.items() if side in WHOLE_SIDES}


WHOLE_SIDES = ("weight.grad", "grad")


def outlier_net():
    """Offsets of a few channels, undone in the next layer: 4 bits lose the ordinary channels."""
    # behind a bounded function, so that 4 bits may be asked for
    model = nn.Sequential(nn.Tanh(), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    with torch.no_grad():
        model[1].bias[5::128] = 100.0
        model[3].weight[:, 5::128] /= 100.0
    return model


def test_the_error_of_stored_activations_is_seen():
    seen, model, x = {}, outlier_net(), torch.randn(512, 256)
    target, options = torch.randn(512, 256), {"memory_bits": 4}
    loss_of = lambda step: (step(x) * target).mean()  # noqa: E731
    step = compiled(model, hot_compile.Monitor(1, callback=seen.__setitem__), **options)
    for _ in range(2):
        model.zero_grad()
        loss_of(step).backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    loss_of(model).backward()
    found = whole(seen[1])
    for name, parameter in model.named_parameters():
        quality = found[name.removesuffix(".weight")]
        whole_cosine = cosine(got[name], parameter.grad)
        assert quality.cosine == pytest.approx(whole_cosine, abs=1e-2)  # what a sketch knows


def test_storage_is_blamed_where_no_layer_is():
    monitor, model, x = hot_compile.Monitor(2, 0.3, 1), outlier_net(), torch.randn(512, 256)
    target, reports = torch.randn(512, 256), Reports()
    step = compiled(model, monitor, reports, memory_bits=4)
    for _ in range(8):
        (step(x) * target).mean().backward()
    assert not monitor.demoted
    assert "whole error" in monitor.raised["1:addmm"]
    last = {c.module: c.scheme for c in reports.graphs[-1].crossing}
    assert last["1"] == "groups6"
    assert last["0"] == "int4"  # does no harm


def test_watching_changes_no_step_and_the_twin_repeats_it():
    """Everything exact: the twin's gradients are the step's, and training is that of no monitor."""
    seen, runs = [], []
    options = {"override": {"*": "exact"}, "memory": "off"}
    for every in (1, 10**6):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Busy(0.3)
        monitor = hot_compile.Monitor(every, callback=lambda _, found: seen.append(found))
        step, gradients = compiled(model, monitor, **options), []
        for _ in range(3):
            model.zero_grad()
            (step(torch.randn(32, 64)) + step(torch.randn(32, 64))).square().mean().backward()
            gradients += [p.grad.clone() for p in model.parameters()]
        runs.append([*gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for found in seen:
        qualities = {name: q for name, q in whole(found).items() if name != "fc1.bias"}
        assert set(qualities) == {"fc1", "norm.weight", "norm.bias", "fc2", "fc2.bias"}
        assert all(q.error < 1e-4 for q in qualities.values())


def test_under_autocast_and_through_a_graph_break():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = net(), net()

        def forward(self, x):
            x = self.a(x).view(-1, 64)
            torch._dynamo.graph_break()
            return self.b(x)

    found, model = {}, Broken()
    step = compiled(model, hot_compile.Monitor(1, callback=lambda _, q: found.update(whole(q))))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(torch.randn(64, 64)).float().square().mean()
        loss.backward()
    assert {"a.0", "a.2", "b.0", "b.2"} <= found.keys()
    assert all(q.cosine > 0.99 for q in found.values())


def test_shapes_that_change_are_watched_without_a_compilation_each():
    seen, model = {}, net()
    step = compiled(model, hot_compile.Monitor(1, callback=seen.__setitem__))
    for rows in (32, 48, 64, 48, 80, 96, 112):
        step(torch.randn(rows, 64)).square().mean().backward()
    assert "0" in seen[1]


@pytest.mark.parametrize("when", ["compiling", "running"])
def test_a_twin_that_fails_costs_a_warning_and_no_step(caplog, monkeypatch, when):
    if when == "compiling":
        monkeypatch.setattr(watching, "compiled_for", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(watching._Look, "rerun", lambda *_: 1 / 0)
    model, x = net(), torch.randn(64, 64)
    step = compiled(model, hot_compile.Monitor(every=1))
    for _ in range(3):
        model.zero_grad()
        step(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    warnings = [r.getMessage() for r in caplog.records if "not observed" in r.getMessage()]
    assert len(warnings) == 1
    assert "ZeroDivisionError" in warnings[0]


def test_inputs_changed_before_the_backward_are_not_compared():
    """The step saves no bias, so it runs; its twin would start from another one."""
    seen, model, x = [], nn.Sequential(nn.Linear(64, 64)), torch.randn(64, 64)
    step = compiled(model, hot_compile.Monitor(1, callback=lambda *a: seen.append(a)))
    for _ in range(3):
        loss = step(x).sum()
        with torch.no_grad():
            model[0].bias.add_(1)
        loss.backward()
    assert not seen
    assert model[0].weight.grad is not None


def peak_of(model, x, **compiled_with):
    """Peak of one step, the fourth; every second one is watched."""
    torch._dynamo.reset()
    step = torch.compile(lambda x: model(x).square().mean(), **compiled_with)

    def run():
        model.zero_grad(set_to_none=True)
        step(x).backward()

    for _ in range(3):
        run()
    model.zero_grad(set_to_none=True)
    return peak_bytes(run, x.device)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_a_watched_step_takes_no_more_memory_than_an_exact_one(kind):
    torch.manual_seed(0)
    if kind == "weights":  # at most what the sketches work in comes on top
        layers, x, more = [nn.Linear(1024, 1024) for _ in range(4)], torch.randn(256, 1024), 2**21
        model = nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])
    else:
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, F.gelu, batch_first=True)
        model, x, more = nn.TransformerEncoder(layer, 4), torch.randn(8, 128, 128), 0
    exact = peak_of(model, x, backend="inductor")
    monitor = hot_compile.Monitor(every=2, rotate=1)
    watched = peak_of(model, x, backend="hot", options={"min_gain": 0, "monitor": monitor})
    assert watched <= exact + more


class Block(nn.Module):
    """What a break of Dynamo's makes a graph of: one for blocks that differ in nothing it knows."""

    def __init__(self, width, offset):
        super().__init__()
        self.fc, self.norm, self.offset = nn.Linear(64, width), nn.LayerNorm(width), offset

    def forward(self, x):
        torch._dynamo.graph_break()
        return F.pad(self.norm(self.fc(x)) + self.offset, (0, 64 - self.fc.out_features))


def looked_at(monitor, *blocks, batches=(64,) * 4):
    """A monitor that has watched steps of the blocks, one behind the other."""
    model = nn.Sequential(*blocks)
    step = compiled(model, monitor)
    for batch in batches:
        model.zero_grad()
        step(torch.randn(batch, 64, requires_grad=True)).square().mean().backward()
    return monitor


@pytest.mark.parametrize("others", [[(48, 0)], [(64, 1)], [(64, 1), (48, 0)]])
def test_blocks_of_the_same_code_are_graphs_of_their_own(others):
    monitor = looked_at(Acceptance(), Block(64, 0), *(Block(*other) for other in others))
    assert len(monitor.graphs) == monitor.compiles == 1 + len(others)
    found = hot_compile.certificate(monitor)
    assert all(graph.gauge.looks == 3 for graph in monitor.graphs), "at steps 1, 2 and 4"
    worst = [graph.gauge.errors for graph in monitor.graphs]
    assert found.errors.worst == max(each.worst for each in worst)
    assert found.errors.name.startswith(tuple(each.name for each in worst))
    assert " of graph " in found.errors.name
    assert found.layers == found.graphs == len(monitor.graphs)
    assert f"{monitor.compiles} compiles of {found.graphs} graphs." in str(found)
    assert not found.unseen
    for graph in monitor.graphs:
        graph.gauge.traces["fc.bias"].looks = 0
    unseen = hot_compile.certificate(monitor).unseen
    assert unseen.keys() == {f"fc.bias of graph {n}" for n in range(len(monitor.graphs))}


def test_a_graph_for_other_batches_takes_the_place_of_the_one_before():
    monitor = looked_at(Monitor(), Block(64, 0), batches=(64, 32, 16))
    assert monitor.compiles == 2
    assert len(monitor.graphs) == 1


@pytest.mark.parametrize("offset", [0, 1])
def test_blocks_that_are_repaired_are_compiled_in_place(offset):
    """Two of one graph, or a graph for each, of which the code is dropped together."""
    monitor = looked_at(Monitor(budget=1e-3), Block(64, 0), Block(64, offset), batches=9 * [64])
    assert monitor.demoted or monitor.raised or monitor.stored
    graphs = 1 + bool(offset)
    assert len(monitor.graphs) == graphs
    assert monitor.compiles > graphs
    assert any(graph.gauge.repairs for graph in monitor.graphs)
    assert not hot_compile.certificate(monitor).off


def test_what_was_done_to_layers_of_the_same_name_is_not_done_to_others_yet():
    """A block that is wrong is repaired, though a narrower one was, and is exact by now."""
    block, narrow = (
        Gauge(config=HotConfig(), trained=["fc.weight"], weights=["fc.weight"]) for _ in range(2)
    )
    monitor = Monitor(budget=0.1, stored={"fc": "stores activations exactly: why"})
    block.config = monitor.applied(block.config, ["fc.weight"])
    for gauge in (block, narrow):
        gauge.gradient("fc.weight", torch.ones(2), 2 * torch.ones(2))
        gauge.read()
    assert not monitor.faults({}, block)
    assert monitor.faults({}, narrow).keys() == {"fc.weight"}
