"""What the planner makes of rates measured on other devices, by the files they were kept in."""

import dataclasses
import functools
import json
import sys

import pytest
import torch
from samples_storage import Block
from torch import fx, nn
from torch._functorch import config as functorch_config
from typer.testing import CliRunner

from hot_compile import explain
from hot_compile.accounting import Measured, MemoryReport
from hot_compile.cli import app
from hot_compile.config import HotConfig
from hot_compile.errors import OptionError
from hot_compile.inspect import predicted_time
from hot_compile.passes import pipeline
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.cost import devices, tuned
from hot_compile.passes.cost.devices import RATES, rates_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.passes.plan import Plan
from hot_compile.passes.storage.choose import plan_storage, worth_it
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.layout import in_memory, packed_bytes
from hot_compile.passes.storage.prices import storing_seconds
from hot_compile.planning import predict

CPU = torch.device("cpu")
T = 1e12


def ampere(bf16, fp32, tf32, integer, int4, transform, copy, packing):
    """Rates as ``hot-compile tune`` might find them on a GPU that queues calls."""
    exact = {"float32": fp32, "tfloat32": tf32, "bfloat16": bf16, "float16": bf16}
    base = Rates(exact, integer, int4, transform, launch=9e-6, asynchronous=True, start=4e-6)
    return dataclasses.replace(base, copy=copy, packing=packing, coding=2 * T)


DEVICES = {
    "A100": ampere(250 * T, 17 * T, 120 * T, 450 * T, 900 * T, 1.1 * T, 1.55 * T, 1.2 * T),
    "RTX 3090": ampere(65 * T, 25 * T, 32 * T, 250 * T, 480 * T, 0.6 * T, 0.82 * T, 0.7 * T),
    "RTX 4090": ampere(165 * T, 60 * T, 82 * T, 330 * T, 330 * T, 0.7 * T, 0.9 * T, 0.8 * T),
    "RTX 4090, full rate": ampere(
        165 * T, 60 * T, 82 * T, 660 * T, 660 * T, 0.7 * T, 0.9 * T, 0.8 * T
    ),
    "H100": dataclasses.replace(
        ampere(650 * T, 48 * T, 280 * T, 1250 * T, 1250 * T, 2.2 * T, 3 * T, 2.6 * T),
        one_read=True,
    ),
    "H200": RATES["sm90"],
    "CPU without VNNI": dataclasses.replace(
        RATES["cpu"],
        exact=dict.fromkeys(RATES["cpu"].exact, 60e9),
        **dict.fromkeys(("integer", "int4"), 40e9),
    ),
}
PRODUCTS = {
    "ViT": (128 * 197, 768, 3072, True),
    "Llama": (4 * 2048, 2048, 2048, False),
    "MLP": (4 * 2048, 2048, 5504, False),
}
"""Rows, width, hidden width, and whether there are biases."""


@pytest.fixture
def file_of(rates_folder):
    """The file in which a device's rates were kept."""

    def save(name, rates=None):
        path = tuned.save(CPU, rates or DEVICES[name])
        return str(path.rename(rates_folder / f"{name}.json"))

    return save


def two(rows, width, hidden, bias=True):
    def make(batch):
        up, down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        model = nn.Sequential(up, nn.GELU(), down, nn.ReLU())
        return model, (torch.empty(batch, rows, width),)

    return make


def planned(make, path, dtype="bf16", **options):
    return predict(make, 1, path, dtype, options=options).graphs


def rewritten(graphs):
    return {d.site: d.gx_bits for graph in graphs for d in graph.plan.rewritten}


@pytest.mark.parametrize(
    ("name", "model", "bits"),
    [
        ("A100", "ViT", None),  # twice the exact rate does not pay for quantising 768 columns
        ("A100", "Llama", 4),
        ("RTX 3090", "ViT", 4),  # exact products are slow there
        ("RTX 3090", "Llama", 4),
        ("RTX 4090", "ViT", None),
        ("RTX 4090", "Llama", 8),  # INT4 was measured to be no faster
        ("RTX 4090, full rate", "ViT", 8),
        ("H100", "ViT", None),
        ("H100", "Llama", None),
        ("H200", "Llama", 8),  # its kernels took 216 us, exact ones 202; they draw more power
        ("H200", "MLP", 8),
        ("CPU without VNNI", "ViT", None),
        ("CPU without VNNI", "Llama", None),
    ],
)
def test_layers_are_rewritten_where_the_devices_own_rates_say_it_pays(name, model, bits, file_of):
    graphs = planned(two(*PRODUCTS[model]), file_of(name))
    won = sum(g.plan.seconds_won for g in graphs) > 0
    assert set(rewritten(graphs).values()) == {bits} - {None}
    assert won is (bool(bits) and (name, model) != ("H200", "Llama"))


def test_measured_tf32_counts_where_products_may_use_it(file_of):
    path = file_of("A100")
    assert rates_of(path, tf32=True).exact["float32"] == 120 * T
    assert rates_of(path).exact["float32"] == 17 * T
    assert rewritten(planned(two(*PRODUCTS["ViT"]), path, "fp32"))


def test_this_machines_file_decides_what_is_done_here(rates_folder):
    """The same model on the same machine: a file that says INT8 does not pay, and one that does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 1536), nn.ReLU(), nn.Linear(1536, 768), nn.ReLU())
    x, plans = torch.randn(1024, 768), {}
    for name in ("RTX 3090", "CPU without VNNI"):
        tuned.save(CPU, dataclasses.replace(DEVICES[name], asynchronous=False, launch=1e-9))
        devices._kept.cache_clear()  # as another process
        plans[name] = [len(explain(model, x).plan.rewritten)]
        plans[name].append(len(explain(model, x, options={"prices": "table"}).plan.rewritten))
    assert [chosen for chosen, _ in plans.values()] == [2, 0]
    assert len({table for _, table in plans.values()}) == 1


@pytest.mark.parametrize("content", [None, "", "{}", '{"format": 1, "rates": {}}'])
def test_a_file_to_plan_by_that_holds_no_rates_is_a_mistake(content, tmp_path):
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match="a file made by `hot-compile tune`"):
        rates_of(str(path))


def test_the_command_plans_by_a_file(file_of, tmp_path, monkeypatch):
    (tmp_path / "mine_by_file.py").write_text(
        "import torch\ndef make(batch):\n"
        "    return torch.nn.Linear(64, 64), (torch.empty(batch, 64),)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)  # where a user's own file lies
    words = ["plan", "--model", "mine_by_file:make", "--batch", "8", "--device", file_of("A100")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "rates: the file" in done.output


# --- what storing costs


def blocks(batch):
    return nn.Sequential(Block(width=256), Block(width=256)), (torch.empty(batch, 512, 256),)


def one_block(batch):
    return Block(width=128), (torch.empty(batch, 256, 128),)


@pytest.fixture(scope="module")
def found():
    """What crosses in two transformer blocks: nothing of it is stored yet."""
    kept = []

    def plan(found, *_):
        kept.extend(found)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "plan_storage", plan)
        predict(blocks, 64, "a100", "bf16")
    return kept


def priced(rates):
    return functools.partial(storing_seconds, rates=rates)


def crossings(graphs):
    return [c for graph in graphs for c in graph.crossing]


def by_scheme(graphs):
    found = {}
    for c in crossings(graphs):
        found.setdefault(c.scheme, []).append(c)
    return found


def test_storing_costs_what_it_moves(file_of):
    """A GELU's input is packed in its kernel; a norm's rows where they are made.

    Restoring them is part of whoever reads them. Either is arithmetic as well."""
    rates = DEVICES["A100"]
    graphs = predict(blocks, 64, file_of("A100"), "bf16", options={"memory": "all"}).graphs
    found = by_scheme(graphs)
    gelu = [c for c in found["groups6"] if c.module.endswith("fc1")]
    rows = [c for c in found["rows8"] if ".norm" in c.module]
    assert gelu
    assert rows
    for c in (*gelu, *rows):
        elements = c.bytes_before / getattr(torch, c.dtype).itemsize
        assert c.seconds == pytest.approx(c.bytes / rates.copy + 2 * elements / rates.coding)
    assert all(c.seconds == 0 for c in found["exact"])


def test_what_attention_reads_is_packed_and_restored_by_kernels_of_their_own(file_of):
    rates = DEVICES["A100"]
    found = by_scheme(predict(one_block, 64, file_of("A100")).graphs)
    for c in found["groups12"]:
        each = (c.bytes_before + c.bytes) / rates.packing + rates.start
        assert c.seconds == pytest.approx(2 * each)


@pytest.mark.parametrize("name", DEVICES)
def test_a_slower_device_stores_slower(name, found):
    """Every price is a sum of bytes over rates and of calls."""
    rates, fields = DEVICES[name], ("copy", "packing", "coding")
    slow = {field: getattr(rates, field) / 2 for field in fields}
    slow |= {field: getattr(rates, field) * 2 for field in ("launch", "start")}
    pair = priced(rates), priced(dataclasses.replace(rates, **slow))
    for crosser in found:
        for scheme in crosser.schemes:
            fast, half = (price(crosser, scheme) for price in pair)
            assert half == pytest.approx(2 * fast)
            assert (fast == 0) is (scheme is Scheme.EXACT)


def test_overridden_rates_price_storing_too(file_of):
    path = file_of("A100")
    graphs = [
        planned(one_block, path, memory="all", **options)
        for options in ({}, {"rates": {"copy": 1e10, "packing": 1e9, "coding": 1e9}})
    ]
    usual, slow = (sum(c.seconds for c in crossings(g)) for g in graphs)
    assert slow > 50 * abs(usual)


def test_a_device_without_rates_has_no_prices(monkeypatch):
    monkeypatch.setattr(devices, "_missing", lambda kind: "no runtime for cpu: none")
    explanation = explain(*_small())
    stored = [c for c in crossings(explanation.graphs) if c.scheme != "exact"]
    assert stored
    assert all(c.seconds is None for c in stored)
    assert "predicted time of storing: unknown" in str(explanation)


def _small():
    torch.manual_seed(0)
    return Block(width=128), torch.randn(8, 64, 128)


def test_explain_says_what_a_step_is_predicted_to_take():
    explanation = explain(*_small(), options={"min_gain": 0})
    graphs = explanation.graphs
    cost = sum(c.seconds for c in crossings(graphs))
    won = sum(d.seconds_won for d in explanation.plan)
    assert won != 0
    (said,) = (line for line in str(explanation).splitlines() if line.startswith("predicted:"))
    ms = [float(word) for word in said.replace(",", "").split() if word[0].isdigit()]
    assert ms == pytest.approx([1e3 * abs(n) for n in (cost, won, cost - won)], rel=1e-2)
    assert ("more than exact" in said) is (cost > won)
    total = [graph.predicted_seconds for graph in graphs]
    assert sum(t["storing"] for t in total) == pytest.approx(cost)
    assert sum(t["layers"] for t in total) == pytest.approx(-won)
    json.dumps(explanation.to_json())


def test_memory_report_says_it_too():
    graphs = explain(*_small()).graphs
    nothing = {"exact": Measured(1, 0, 1)}
    report = MemoryReport(graphs[0].crossing, nothing, graphs=graphs)
    assert predicted_time(graphs) in str(report)
    assert report.to_json()["predicted_seconds"] == [graphs[0].predicted_seconds]


# --- memory="free"


FREE = HotConfig.from_options({"memory": "free"})


def saved_by(chosen):
    return sum(
        packed_bytes(in_memory(c.saved), Scheme.EXACT) - packed_bytes(in_memory(c.saved), scheme)
        for c, scheme in chosen.items()
    )


@pytest.mark.parametrize("name", DEVICES)
def test_free_storage_takes_no_more_time_than_layers_win(name, found):
    """From nothing won to more than enough: from what costs nothing to all that may be stored."""
    price = priced(DEVICES[name])
    everything = plan_storage(found, HotConfig())
    whole = sum(price(c, scheme) for c, scheme in everything.items())
    sizes = []
    for won in (-1.0, 0.0, whole / 4, whole / 2, abs(whole) + 1):
        chosen = plan_storage(found, FREE, price, won)
        costs = {c: price(c, scheme) for c, scheme in chosen.items()}
        assert sum(costs.values()) <= max(0.0, won) + 1e-15
        sizes.append(saved_by(chosen))
    assert 0 == sizes[0] == sizes[1] <= sizes[2] <= sizes[3] <= sizes[4]
    assert sizes[2] < sizes[4]
    assert chosen == everything


def test_free_storage_takes_what_saves_most_bytes_a_second_first(found):
    """A tensor that is too dear does not keep the next from being stored."""
    stored = plan_storage(found, HotConfig())
    norms = [c for c in stored if c.norm][:2]
    value = fx.Graph().placeholder("small")
    value.meta["val"] = torch.empty(64, 256)
    small = Crosser(value, value, (Scheme.EXACT, Scheme.ROWS8))
    costs = dict(zip([*norms, small], (2.0, 1.0, 0.4), strict=True))
    dear = costs[small] / saved_by({small: Scheme.ROWS8})
    assert dear > costs[norms[0]] / saved_by({norms[0]: stored[norms[0]]})

    def taken(won):
        chosen = plan_storage([*costs], FREE, lambda c, scheme: costs[c], won)
        return sorted(costs[c] for c in chosen)

    budgets = {0.0: [], 0.4: [0.4], 1.0: [1.0], 1.4: [0.4, 1.0], 2.5: [0.4, 1.0], 3.0: [1.0, 2.0]}
    assert {won: taken(won) for won in budgets} == budgets
    assert taken(3.4) == [0.4, 1.0, 2.0]


def test_free_storage_without_prices_stores_nothing(found):
    assert plan_storage(found, FREE, lambda crosser, scheme: None, 1.0) == {}


def test_views_of_one_storage_are_paid_for_together():
    """Half of a tensor stored would keep the whole of it alive."""
    graph = fx.Graph()
    whole = graph.call_function(aten.exp.default, (graph.placeholder("x"),))
    halves = [graph.call_function(aten.slice.Tensor, (whole, 0, n, n + 64)) for n in (0, 64)]
    for half in halves:
        half.meta["val"] = torch.empty(64, 256)
    views = [Crosser(half, half, (Scheme.EXACT, Scheme.ROWS8)) for half in halves]

    def taken(won):
        return len(plan_storage(views, FREE, lambda crosser, scheme: 1.0, won))

    assert [taken(won) for won in (0.9, 1.9, 2.0)] == [0, 0, 2]


def test_free_storage_in_a_whole_plan(file_of):
    """What layers win is what storing may take; nothing else about the layers changes."""
    path = file_of("RTX 3090")

    def wide(batch):
        layers = nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.ReLU()
        return nn.Sequential(*layers), (torch.empty(batch, 1024),)

    plans = {
        memory: predict(wide, 8192, path, "bf16", options={"memory": memory}).graphs
        for memory in ("free", "off")
    }
    free, off = plans["free"], plans["off"]
    assert rewritten(free) == rewritten(off) != {}
    won = sum(graph.plan.seconds_won for graph in free)
    assert 0 < sum(c.seconds for c in crossings(free)) <= won
    assert sum(g.held_bytes for g in free) < sum(g.held_bytes for g in off)


@pytest.mark.parametrize("name", ["H100", "CPU without VNNI"])
def test_where_nothing_is_won_everything_stays_as_it_is(name, file_of):
    path = file_of(name)
    free, off = (
        predict(one_block, 8, path, options={"memory": memory}).graphs for memory in ("free", "off")
    )
    assert not rewritten(free)
    free, off = crossings(free), crossings(off)
    assert [(c.name, c.scheme, c.bytes) for c in free] == [(c.name, "exact", c.bytes) for c in off]


def test_the_cut_moves_where_what_then_crosses_is_stored(file_of, monkeypatch):
    """A norm's input is written anyway, its normalised form only to be stored."""
    path = file_of("H100")

    def free(won):
        monkeypatch.setattr(Plan, "seconds_won", property(lambda _: won))
        found = crossings(predict(one_block, 8, path, options={"memory": "free"}).graphs)
        assert sum(c.seconds for c in found) <= won
        return found

    enough, off = sum(c.seconds for c in free(1e9)), {c.name: c.bytes for c in free(0.0)}
    held = [sum(off.values())]
    for found in (free(share * enough) for share in (0.1, 0.3, 0.9, 1.01)):
        assert {c.name: c.bytes for c in found if c.scheme == "exact"}.items() <= off.items()
        held.append(sum(c.bytes for c in found))
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-2] > held[-1]


def convolutions(batch):
    """Batch norms between convolutions: a step that does little but move memory."""
    parts = []
    for channels in (3, 64, 64, 64):
        parts += nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    return nn.Sequential(*parts), (torch.empty(batch, 3, 56, 56),)


@pytest.mark.parametrize(
    ("name", "model", "batch"),
    [
        ("A100", blocks, 64),
        ("H200", convolutions, 1024),
        pytest.param("RTX 3090", convolutions, 64, marks=pytest.mark.slow),
    ],
)
def test_by_default_a_gpus_step_takes_little_longer_for_storing(file_of, name, model, batch):
    file = file_of(name)
    (every,) = predict(model, batch, file, "bf16", options={"memory": "all"}).graphs
    (most,) = predict(model, batch, file, "bf16").graphs
    assert most.storing_seconds <= every.storing_seconds
    assert most.held_bytes >= every.held_bytes
    left = [c for c in most.crossing if c.reason == pipeline.TOO_DEAR]
    assert bool(left) == (most.held_bytes > every.held_bytes)
    assert all(c.scheme == "exact" and c.bytes == c.bytes_before for c in left)


def test_what_moves_memory_only_keeps_its_dearest_exact(file_of):
    """What is made again is cheaper by its bytes: it comes first."""
    path = file_of("H100")
    (graph,) = predict(convolutions, 512, path, "bf16").graphs
    assert any(c.reason == pipeline.TOO_DEAR for c in graph.crossing)
    (again,) = predict(convolutions, 512, path, "bf16", options={"recompute": False}).graphs
    assert any(c.scheme != "exact" for c in again.crossing)


def test_what_a_user_has_made_again_is_not_kept_for_the_time_it_takes(file_of, monkeypatch):
    """A budget of torch's says what to make again; then prices do not."""
    asked, path = [], file_of("H100")
    monkeypatch.setattr(pipeline, "keep_inputs", lambda *_: asked.append(None) or (0, 0.0))
    predict(convolutions, 64, path, "bf16")
    assert asked
    asked.clear()
    with functorch_config.patch(activation_memory_budget=0.9):
        predict(convolutions, 64, path, "bf16")
    assert not asked


def test_a_cpu_stores_everything_by_default(file_of):
    (every,) = predict(convolutions, 8, "cpu", options={"memory": "all"}).graphs
    (default,) = predict(convolutions, 8, "cpu").graphs
    assert default.held_bytes == every.held_bytes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0, 2.0])
def test_the_dearest_by_bytes_saved_go_first(found, share):
    chosen = plan_storage(found, HotConfig())
    rates = DEVICES["A100"]

    def price(crosser, scheme):
        return storing_seconds(crosser, scheme, rates)

    def rate(crosser):
        saved = crosser.saved.meta["val"].nbytes - packed_bytes(
            in_memory(crosser.saved), chosen[crosser]
        )
        return price(crosser, chosen[crosser]) / saved

    total = sum(price(c, s) for c, s in chosen.items())
    kept = worth_it(chosen, price, share * total)
    assert sum(price(c, s) for c, s in kept.items()) <= share * total * (1 + 1e-9)
    assert kept.items() <= chosen.items()
    assert (kept == chosen) == (share >= 1)
    dropped = chosen.keys() - kept.keys()
    assert not dropped or max(map(rate, kept), default=0) <= min(map(rate, dropped)) * (1 + 1e-9)


def test_channels_cost_more_the_fewer_there_are(file_of):
    """One block adds up each channel's partial results: an image of three is left as it is."""
    path, start = file_of("H200"), DEVICES["H200"].start
    (every,) = predict(convolutions, 64, path, "bf16", options={"memory": "all"}).graphs
    images = {int(c.shape[1]): c for c in every.crossing if c.scheme.startswith("channels8")}
    assert images.keys() == {3, 64}
    assert images[3].seconds > 50 * start
    assert images[3].seconds > images[64].seconds
    (default,) = predict(convolutions, 64, path, "bf16").graphs
    stored = {int(c.shape[1]) for c in default.crossing if c.scheme.startswith("channels8")}
    assert 3 not in stored
