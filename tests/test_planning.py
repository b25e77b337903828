"""``hot-compile plan``: predictions for a device that is not here, without memory or a run."""

import html.parser
import json
import re
import resource
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hot_compile import explain
from hot_compile.cli import app
from hot_compile.passes.cost.devices import CHIPS, rates_of
from hot_compile.passes.cost.linear import Rates
from hot_compile.planning import (
    DTYPES,
    OPTIMIZERS,
    largest_batch,
    maker,
    predict,
)
from hot_compile.stock import STOCK

MODULE = """
import torch
from torch import nn
def make(batch):
    torch.manual_seed(0)
    layers = nn.Linear(512, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(512, 16)), (torch.empty(batch, 64, 512),)
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    (tmp_path / "mine_to_plan.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "mine_to_plan:make"


@pytest.mark.parametrize("options", [STOCK, {"recipe": "exact"}])
def test_predicts_what_a_trace_of_real_tensors_says(spec, options):
    make = maker(spec)
    model, _ = make(1)
    real = explain(model, torch.randn(32, 64, 512), options=options)
    found = predict(make, 32, "h200", options=options)
    assert found.held == real.held_bytes > 0
    assert [d.site for g in found.graphs for d in g.plan] == [d.site for d in real.plan]


def test_nothing_runs_and_no_memory_is_filled(spec):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = predict(maker(spec), 2**12, "h200", "bf16", options={"memory": "off"})
    assert found.inputs == 2**12 * 64 * 512 * 4
    assert found.held > 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes * 1024 < found.held // 2


def test_layers_are_chosen_by_the_devices_rates(spec):
    """A100's INT4 tensor cores make g_x's operands 4 bits wide; Hopper has none."""
    widths = {}
    for device in ("a100", "h200"):
        plan = predict(maker(spec), 256, device).graphs[0].plan
        widths[device] = {d.gx_bits for d in plan.rewritten}
    assert widths == {"a100": {4}, "h200": {8}}


def test_weights_are_counted_once_and_frozen_ones_get_no_gradient():
    def make(batch):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        model.add_module("tied", nn.Linear(64, 64, bias=False))
        model.tied.weight = model[0].weight
        model[1].weight.requires_grad_(False)
        return model, (torch.empty(batch, 64),)

    sizes = {o: predict(make, 32, "a100", optimizer=o) for o in ("adamw", "momentum", "sgd")}
    one = 64 * 64 * 4
    for name, states in (("adamw", 2 * one), ("momentum", one), ("sgd", 0)):
        found = sizes[name]
        assert (found.weights, found.gradients, found.states) == (2 * one, one, states)
        assert found.total == found.held + 3 * one + states + 32 * 64 * 4


@pytest.mark.parametrize("device", [*CHIPS, "cpu"])
@pytest.mark.parametrize("tf32", [False, True])
def test_every_device_has_rates(device, tf32):
    assert isinstance(rates_of(device, tf32), Rates)


@pytest.mark.parametrize("start", [1, 7, 64, 4096])
@pytest.mark.parametrize("each", [1, 10, 333])
@pytest.mark.parametrize("fixed", [0, 5000])
def test_the_largest_batch_is_exact_where_bytes_are_linear(start, each, fixed):
    tried = []

    def total(batch):
        tried.append(batch)
        return fixed + each * batch

    assert largest_batch(total, 20_000, start) == (20_000 - fixed) // each
    assert len(tried) == len(set(tried)) <= 4


def test_the_largest_batch_fits_where_bytes_jump():
    def total(batch):
        return 100 * batch if batch < 50 else 30 * batch + 4000

    for memory in (90, 100, 3000, 4999, 5500, 60_000):
        found = largest_batch(total, memory, 64)
        if memory < 100:
            assert found is None
        else:
            assert total(found) <= memory < total(found + 1)


class Data(html.parser.HTMLParser):
    found = ""

    def handle_data(self, data):
        if self.cdata_elem == "script" and not self.found:
            self.found = data


def test_the_command_says_all_of_it(spec, tmp_path):
    page = tmp_path / "page.html"
    more = ["--batch", "64", "--device", "h200", "--memory", "2GiB", "--html", str(page)]
    done = CliRunner().invoke(app, ["plan", "--model", spec, *more])
    assert done.exit_code == 0, done.output
    for said in (
        "products rewritten",
        "together",
        "Inductor as it is",
        "Not counted",
        "so counted",
    ):
        assert said in done.output
    reader = Data()
    reader.feed(page.read_text(encoding="utf-8"))
    data = json.loads(reader.found)
    assert [row["site"] for row in data["layers"]] == ["0", "3", "5"]
    assert data["title"].startswith(f"{spec}, batch 64, fp32, on h200")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--device", "h2000"], "expected one of h200"),
        (["--dtype", "int3"], "expected one of fp32"),
        (["--optimizer", "lion"], "expected one of adamw"),
        (["--recipe", "cold"], "recipe"),
        (["--model", "vit"], "timm:NAME"),
        (["--model", "timm:vit_of_mine"], "timm has no such model"),
        (["--model", "nowhere.at_all:make"], "No module named"),
        (["--model", "mine_to_plan:missing"], "has no attribute"),
        (["--memory", "24"], "24GiB"),
        (["--budget", "24"], "24GiB"),
        (["--budget", "0.1MB"], "the least that it is predicted to add"),
        (["--batch", "0"], "to 1"),
    ],
)
def test_mistakes_are_explained(spec, change, said):
    given = {"--model": spec, "--batch": "8", "--device": "h200"} | {change[0]: change[1]}
    done = CliRunner().invoke(app, ["plan", *(word for pair in given.items() for word in pair)])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())


def test_a_budget_of_the_peak_is_planned(spec):
    given = ("--model", spec, "--batch", "8", "--device", "h200", "--budget", "900MiB")
    done = CliRunner().invoke(app, ["plan", *given])
    assert done.exit_code == 0, done.output
    assert "budget of the peak: 900.00 MiB asked" in done.output


def test_the_help_names_every_choice():
    said = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).output
    assert all(name in said for name in (*CHIPS, *DTYPES, *OPTIMIZERS, "cpu"))


def test_other_commands_wait_neither_for_inductor_nor_for_the_cost_model():
    parts = "{'hot_compile.backend', 'hot_compile.passes.cost'}"
    code = f"import sys, hot_compile.cli; assert not {parts} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


class Alone(nn.Module):
    """A head and its loss."""

    def __init__(self, rows, outputs, inputs):
        super().__init__()
        self.rows = nn.Parameter(torch.empty(rows, inputs, dtype=torch.bfloat16))
        self.head = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)

    def forward(self, labels):
        return nn.functional.cross_entropy(self.head(self.rows), labels)


@pytest.mark.parametrize("autocast", [{}, {"dtype": "bf16"}])
def test_no_layer_raises_the_peak_that_a_step_has_exact(autocast):
    """On an H100 (torch 2.11) stock rose by 3070 MiB. The gradient of the logits, and of its two
    forms in 8 bits and of x, are 4040."""

    def alone(batch):
        with torch.device("meta"):
            model = Alone(batch, 128256, 4096)
        return model.to_empty(device="cpu"), (torch.zeros(batch, dtype=torch.int64),)

    (graph,) = predict(alone, 8192, "h100", **autocast, options={"head": "int8"}).graphs
    (head,), (decision,) = graph.plan.heads, graph.plan
    assert head.way == "off"
    assert re.search(r"int8 takes \d+ MiB more than the whole head", head.reason)
    above = re.fullmatch(r"INT8 .* take (\d+) MiB above the step's exact peak", decision.reason)
    assert above
    assert int(above[1]) == pytest.approx(4040 - 3070, rel=0.04)


def test_a_layer_that_is_not_at_the_peak_is_on_integers_however_large():
    layers = (nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))
    (graph,) = predict(
        lambda batch: (nn.Sequential(*layers), (torch.empty(batch, 512),)),
        2**16,
        "h100",
        "bf16",
        options={"keep_head": False, "min_gain": 0},
    ).graphs
    assert {d.strategy for d in graph.plan} == {"int8"}
