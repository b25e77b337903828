"""How long a step is thought to take, and what it may take longer where it waits for its host."""

import dataclasses

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from hot_compile.passes import hooks, pipeline
from hot_compile.passes.base.graph import aten
from hot_compile.passes.cost import tuned
from hot_compile.passes.cost.conv import products_of
from hot_compile.passes.cost.devices import RATES
from hot_compile.passes.storage.step_time import SLACK, StepTime, step_time
from hot_compile.planning import predict

A100, H200 = RATES["sm80"], RATES["sm90"]


def test_a_step_is_its_products_and_what_they_move():
    rates = A100
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = (torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(2))
    product = graph.call_function(aten.mm.default, (a, b))
    graph.call_function(aten.relu.default, (product,)).meta["val"] = a.meta["val"]
    product.meta["val"] = a.meta["val"]
    expected = 2 * 64**3 / rates.exact["bfloat16"] + 2 * 3 * 64 * 64 * 2 / rates.copy
    step = step_time(graph, lambda _: rates)
    assert step.device == pytest.approx(expected)
    assert step.host == pytest.approx(1.5 * rates.launch)  # the product's; nobody reads the other
    assert step.waits_for_host
    assert step.slack == SLACK * step.host
    assert StepTime(1.0, 9.0, False).slack == SLACK
    assert step_time(graph, lambda _: rates, captured=True) == StepTime(step.device, 0.0)
    assert step_time(graph, lambda _: None) is None
    assert step_time(graph, lambda _: RATES["cpu"]).host == 0
    assert step_time(fx.Graph(), lambda _: rates) is None
    assert 0 < SLACK <= 0.03, "the bar: never more than 3 % slower than stock"


@pytest.mark.parametrize(
    ("a", "b", "made", "products"),
    [
        ((64, 32), (4, 32, 48), (64, 48), 64 * 32 * 48),
        ((32, 64), (64, 48), (4, 32, 48), 64 * 32 * 48),
        ((4, 48, 32), (32, 64), (48, 64), 64 * 32 * 48),
        ((4, 16, 32), (4, 32, 48), (4, 16, 48), 64 * 32 * 48),
    ],
)
def test_products_in_groups_count(a, b, made, products):
    """Each row is multiplied by one matrix, each element of a matrix's gradient a group's rows."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "ab"]
    product = graph.call_function(aten._grouped_mm.default, tuple(given))
    values = [torch.empty(size, dtype=torch.bfloat16) for size in (a, b, made)]
    for node, value in zip((*given, product), values, strict=True):
        node.meta["val"] = value
    moved = 2 * sum(t.nbytes for t in values) / A100.copy
    expected = moved + 2 * products / A100.exact["bfloat16"]
    assert step_time(graph, lambda _: A100).device == pytest.approx(expected)


def test_what_torch_does_not_count_makes_a_step_shorter_only():
    rates, graph = A100, fx.Graph()
    q, k = graph.placeholder("q"), graph.placeholder("k")
    q.meta["val"], k.meta["val"] = torch.empty(1, 4, 64, 32), torch.empty(3, 2, 64, 32)
    attention = aten._scaled_dot_product_efficient_attention.default
    odd = graph.call_function(attention, (q, k, k, None, True))
    odd.meta["val"] = (q.meta["val"], torch.empty(1, 4, 64))
    moved = sum(t.nbytes for t in (q.meta["val"], k.meta["val"], k.meta["val"]))
    moved += sum(t.nbytes for t in odd.meta["val"])
    assert step_time(graph, lambda _: rates).device == pytest.approx(2 * moved / rates.copy)


def images(batch):
    """Batch norms between convolutions, of sizes that halve: the first images hold most bytes."""
    parts, size = [], 4
    for _ in range(4):
        parts += nn.Conv2d(size, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        size = 16
    return nn.Sequential(*parts), (torch.empty(batch, 4, 64, 64),)


@pytest.fixture
def predicted(rates_folder):
    """What ``predict`` says of ``images`` on an H200 whose host takes so long for a call, or on
    another device."""

    def plan(launch, device=H200, **options):
        rates = dataclasses.replace(device, launch=launch)
        path = tuned.save(torch.device("cpu"), rates).rename(rates_folder / "mine.json")
        (graph,) = predict(images, 256, str(path), "bf16", options=options).graphs
        return graph

    return plan


def stored(graph):
    return {c.name: c.bytes_before for c in graph.crossing if c.scheme != "exact"}


def test_a_step_that_waits_for_its_host_is_spared_launches(predicted):
    """Nothing here saves one, so nothing is stored that takes one, and it says why."""
    slow = predicted(1e-3)
    assert any(c.reason == pipeline.TOO_DEAR for c in slow.crossing)
    assert slow.storing_seconds == 0
    every = predicted(1e-3, memory="all")
    assert every.held_bytes < slow.held_bytes
    assert len(stored(every)) > len(stored(slow))


@pytest.mark.parametrize("kind", ["cpu", "cpu-vnni"])
def test_a_cpu_stores_what_a_step_pays_for(predicted, kind):
    """Images want their three percent and what layers win; who forces layers wants no limit."""
    own = RATES[kind]
    usual, every = (predicted(own.launch, own, memory=memory) for memory in ("auto", "all"))
    assert any(c.reason == pipeline.TOO_DEAR for c in usual.crossing)
    assert usual.held_bytes > every.held_bytes
    forced = predicted(own.launch, own, min_gain=0)
    assert not any(c.reason == pipeline.TOO_DEAR for c in forced.crossing)


@pytest.mark.parametrize("launch", [1e-9, 1e-3])
def test_what_a_library_reads_may_be_made_again_whoever_waits(predicted, monkeypatch, launch):
    seen, own = [], hooks.Partitioner._recomputation

    def look(*args):
        with own(*args):
            seen.append(not torch._functorch.config.ban_recompute_materialized_backward)
        return own(*args)

    monkeypatch.setattr(hooks.Partitioner, "_recomputation", look)
    predicted(launch)
    assert seen == [True]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_are_counted_with_their_groups(groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer, x = kind(8, 16, 3, 2, 1, groups=groups, bias=False), torch.randn(2, 8, 12, 12)
    y = layer(x)
    settings = [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups
    places = (x if transposed else y).numel() // (8 if transposed else 16)
    once = 2 * places * layer.weight.numel()
    assert 2 * products_of((x, layer.weight, None, *settings), y) == once
    both = (y, x, layer.weight, None, *settings, [True, True, False])
    assert 2 * products_of(both, (x, layer.weight, None)) == 2 * once
    count = flop_registry[aten.convolution]
    assert count(x, layer.weight, None, *settings, out_val=y) == once
