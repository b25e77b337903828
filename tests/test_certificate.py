"""What looks showed: noise and bias of a gradient, and the certificate of a run."""

import functools
import json

import pytest
import torch
from torch import nn

import hot_compile
from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.observing.evidence import Spread, Trace, faults, judged
from hot_compile.observing.gauge import Gauge
from hot_compile.passes.measure.stored import LOST

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
EXACT = torch.linspace(-1, 1, 4001)


def traced(gots, wants):
    trace = Trace()
    for got, want in zip(gots, wants, strict=True):
        assert trace.add(got, want)
    return trace


def noisy(size, seed):
    chance = torch.Generator().manual_seed(seed)
    draws = [torch.randn(4001, generator=chance) for _ in range(8)]
    return [EXACT + size * EXACT.norm() * draw / draw.norm() for draw in draws]


def test_the_batchs_noise_is_what_exact_gradients_differ_by():
    wants = noisy(0.5, seed=0)
    trace = traced(wants, wants)
    assert trace.noise == pytest.approx(0.5 / 1.25**0.5, rel=0.05)
    assert trace.limit(0.1) == pytest.approx(0.3 * trace.noise)
    assert traced(wants[:1], wants[:1]).noise is None


def test_errors_by_chance_have_nothing_in_common():
    trace = traced(noisy(0.4, seed=1), [EXACT] * 8)
    assert trace.error == pytest.approx(0.4, rel=1e-3)
    assert trace.bias < 0.05
    assert traced([EXACT] * 3, [EXACT] * 3).bias is None


def test_a_bias_below_the_noise_is_seen_and_not_excused():
    errors, wants = noisy(0.1, seed=2), noisy(2.0, seed=3)
    gots = [want + error - EXACT + 0.3 * EXACT for want, error in zip(wants, errors, strict=True)]
    trace = traced(gots, wants)
    assert trace.bias == pytest.approx(0.3 / 5**0.5, rel=0.1)
    assert trace.error < trace.limit(0.1)
    assert "in common" in trace.fault(0.1)
    assert not trace.fault(0.2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_is_lost(value):
    trace = Trace()
    assert trace.add(torch.tensor([value]), torch.ones(1))
    assert trace.error == LOST
    assert trace.error > trace.limit(0.3)
    assert trace.looks == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_where_exact_is_not_finite_or_zero_there_is_no_look(value):
    trace = Trace()
    assert not trace.add(torch.ones(1), torch.tensor([value]))
    assert trace.looks == 0


def test_rounding_is_not_judged():
    """Of gains and biases a thousandth of the largest, of matrices what fp32 cannot add to it."""
    norms = {"a": 1.0, "b": 1e-4, "b.weight": 1e-4, "c": 1e-8, "c.weight": 1e-8}
    traces = {n: traced([EXACT * norm], [EXACT * norm]) for n, norm in norms.items()}
    assert set(judged(traces, {"b.weight", "c.weight"})) == {"a", "b.weight"}


def test_no_layer_is_blamed_for_a_gradient_that_is_not_judged():
    gauge = Gauge(weights=("a.weight", "b.weight"))
    for layer, norm in (("a", 1.0), ("b", 1e-8)):
        gauge.gradient(f"{layer}.weight", norm * EXACT, norm * EXACT)
        for side in ("g_x", "g_w"):
            gauge._keep(layer, side, (torch.tensor(0.5), torch.tensor(0.9)))
    found = gauge.read()
    assert {layer: {"g_x", "g_w"} & set(sides) for layer, sides in found.items()} == {
        "a": {"g_x", "g_w"}, "b": {"g_x"},
    }  # fmt: skip


@pytest.mark.parametrize(("apart", "fault"), [(0.01, True), (0.6, False)])
def test_where_exact_code_differs_from_itself_nothing_is_wrong(apart, fault):
    trace, real = Trace(), Trace()
    trace.add(10 * EXACT, EXACT, apart * EXACT)
    real.add(EXACT, EXACT, 0 * EXACT)
    assert bool(faults({"bias": trace, "weight": real}, 0.2)) == fault


@pytest.mark.parametrize(("size", "fault"), [(10, True), (2, False)])
def test_where_all_gradients_are_rounding_what_is_larger_is_wrong(size, fault):
    """A loss is flat, a contrastive one of a single sample, say: nothing is to be added to it."""
    traces = {"bias": Trace(), "weight": Trace()}
    for trace in traces.values():
        trace.add(size * EXACT, EXACT, 0.6 * EXACT)
    assert bool(faults(traces, 0.2)) == fault


def net():
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64))


def compiled(model, monitor):
    options = {"min_gain": 0, "keep_head": False, "monitor": monitor}
    backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
    return torch.compile(model, backend=backend)


def train(step, model, count):
    for _ in range(count):
        model.zero_grad()
        step(torch.randn(64, 64)).square().mean().backward()


def test_a_certificate_of_a_run(tmp_path):
    model, monitor = net(), hot_compile.Monitor(budget=0.25)
    step = compiled(model, monitor)
    train(step, model, 9)
    found = hot_compile.certificate(step)
    assert (found.layers, found.on_integers) == (2, 2)
    assert found.compiles == 1
    assert [look.step for look in found.looks] == [1, 2, 4, 8]
    assert 0 < found.errors.median <= found.errors.worst < 0.1
    assert found.errors.name in dict(model.named_parameters())
    assert found.noise.median > 0.1  # fresh data at every step
    assert found.bias.worst < 0.1
    assert not found.off
    assert not found.repaired
    assert not found.unseen
    text = str(found)
    assert text.startswith("2 of 2 layers on integers, gradients within ")
    assert "4 looks, 1 compile." in text
    assert text in found._repr_html_().replace("&#x27;", "'")
    found.save_json(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["errors"]["worst"] == found.errors.worst


def test_gradients_of_zero_are_named_as_what_they_are():
    """A head that starts at zero, as Sequencer's: there were backwards, and nothing in them."""
    model = net()
    nn.init.zeros_(model[-1].weight)
    body = model[:-1]
    step = compiled(body, hot_compile.Monitor(budget=0.25))
    for _ in range(2):
        model[-1](step(torch.randn(64, 64))).square().mean().backward()
    found = hot_compile.certificate(step)
    assert found.errors is None
    assert found.unseen.keys() == dict(body.named_parameters()).keys()
    assert all("zero" in why for why in found.unseen.values())


def test_layers_products_are_judged_where_their_whole_gradient_cannot_be():
    """A twin that computed something else says nothing of any gradient."""
    gauge = Gauge(weights=("a.weight",))
    gauge.gradient("a.weight", EXACT, EXACT * torch.nan)
    gauge._keep("a", "g_w", (torch.tensor(0.5), torch.tensor(0.9)))
    assert gauge.read()["a"].keys() == {"g_w"}


def test_what_is_rounded_without_hot_is_told_beside_the_errors():
    model, monitor = net(), hot_compile.Monitor(budget=0.25)
    step = compiled(model, monitor)
    train(step, model, 3)
    assert hot_compile.certificate(step).rounding is None
    (graph,) = monitor.graphs
    for trace in graph.gauge.judged.values():
        trace.rounding = 0.125
    trace.rounding = 0.5
    found = hot_compile.certificate(step)
    assert (found.rounding.median, found.rounding.worst) == (0.125, 0.5)
    assert ", rounding without hot: 12.50%), worst" in str(found)


def test_a_matrix_that_does_not_count_is_named():
    model, monitor = net(), hot_compile.Monitor(budget=0.25)
    step = compiled(model, monitor)
    train(step, model, 3)
    assert not hot_compile.certificate(step).unseen
    (graph,) = monitor.graphs
    graph.gauge.traces["0.weight"].norm = 1e-12
    found = hot_compile.certificate(step)
    assert found.unseen == {"0.weight": "its gradient is less than fp32 can add to the largest"}
    assert found.errors.name != "0.weight"


def test_a_look_at_the_certificate_takes_nothing_from_the_monitor():
    model, monitor = net(), hot_compile.Monitor(budget=1e-3)
    step = compiled(model, monitor)
    for _ in range(9):
        train(step, model, 1)
        found = hot_compile.certificate(step)
    assert found.repaired
    assert found.errors.worst < 0.3 * found.noise.worst
    assert found.looks[0].off > 0


def test_one_line_at_the_end_of_the_looks(caplog):
    model = net()
    train(compiled(model, hot_compile.Monitor(every=1)), model, 12)
    said = [r.getMessage() for r in caplog.records if "layers on integers" in r.getMessage()]
    assert len(said) == 1
    assert "7 looks" in said[0]


def test_what_could_not_be_looked_at_is_named(monkeypatch):
    class Half(nn.Sequential):
        def forward(self, x):
            return self[3](self[1](self[0](x))) + 0 * self[2](x)

    model = Half(nn.Linear(64, 96), nn.GELU(), nn.Linear(64, 64), nn.Linear(96, 64))
    step = compiled(model, hot_compile.Monitor())
    train(step, model, 2)
    found = hot_compile.certificate(step)
    assert set(found.unseen) == {"2.weight", "2.bias"}
    assert "Not looked at: 2.weight and 1 more (its gradient is" in str(found)
    torch._dynamo.reset()
    step = compiled(model, hot_compile.Monitor(every=100))
    train(step, model, 2)
    assert "no watched step" in str(hot_compile.certificate(step))


@pytest.mark.parametrize("kind", ["module", "in place", "function"])
def test_a_step_is_found_however_it_was_compiled(kind):
    model, monitor = net(), hot_compile.Monitor()
    options = {"backend": "hot", "options": {"monitor": monitor}}
    if kind == "in place":
        model.compile(**options)
        step = model
    else:
        step = torch.compile(model if kind == "module" else lambda x: model(x), **options)
    assert hot_compile.certificate(step) == hot_compile.certificate(monitor)


@pytest.mark.parametrize("step", [net(), torch.compile(net(), backend="hot"), print, 3])
def test_a_step_without_a_monitor(step):
    with pytest.raises(TypeError, match="nothing looks at; expected what"):
        hot_compile.certificate(step)


def test_spreads():
    assert Spread.of({"a": 1.0, "b": 3.0, "c": 2.0}) == Spread(2.0, 3.0, "b")
    assert Spread.of({}) is None
