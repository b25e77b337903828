"""The pipeline's steps: in the order that is written down, counted, shown by torch's own means."""

import copy
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from hot_compile.backend import hot
from hot_compile.config import HotConfig
from hot_compile.inspect import run_uncompiled
from hot_compile.passes import pipeline
from hot_compile.passes.base.graph import readable
from hot_compile.passes.base.steps import Step, run
from hot_compile.passes.plan import Plan
from hot_compile.passes.stages import Partitioned

PROGRAM = """
import functools, torch
from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
options = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 0}
backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
torch.compile(model, backend=backend)(torch.randn(64, 32)).sum().backward()
"""


def test_the_order_is_written_down():
    assert [s.name for s in pipeline.HEADS] == ["duration", "heads"]
    assert [s.name for s in pipeline.JOINT] == [
        "match", "candidates", "price", "plan", "warn",
        "rewrite", "forwards", "exact_forms", "signals", "copies",
    ]  # fmt: skip
    assert [s.name for s in pipeline.PARTITIONED] == [
        "layouts", "inputs", "advance", "crossers", "plan_storage", "take_back", "store",
        "functions", "pieces", "sums", "casts", "scalars", "gradients",
        "attention", "kernels",
    ]  # fmt: skip
    for steps in (pipeline.JOINT, pipeline.OBSERVED):
        changes = [step.changes for step in steps]
        assert changes == sorted(changes), "what only reads comes first: it may fail harmlessly"


def test_steps_run_in_order_until_one_that_is_needed_finds_nothing(caplog):
    seen = []

    def step(name, count, **facts):
        return Step(name, lambda state: seen.append((name, state)) or count, **facts)

    steps = (step("a", 2), step("b", 0), step("c", 0, needed=True), step("d", 1))
    with caplog.at_level("DEBUG", "hot_compile"):
        assert not run("test", steps, "state", {})
    assert seen == [("a", "state"), ("b", "state"), ("c", "state")]
    assert run("test", steps[:2], "state", {"graph": fx.Graph()})
    assert "hot: test: a 2, b 0, c 0;" in caplog.text
    assert "hot: test.a: 2 in" in caplog.text


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """What one compilation leaves with torch's own switches on: (log, artifacts by name)."""
    folder = tmp_path_factory.mktemp("trace")
    switches = {"TORCH_LOGS": "+hot_compile", "TORCH_TRACE": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **switches},
    )
    (file,) = folder.glob("*.log")
    lines = file.read_text().splitlines()
    artifacts = {}
    for number, line in enumerate(lines):
        head = json.loads(line[line.index("{") :]) if '"artifact"' in line else {}
        name = head.get("artifact", {}).get("name", "")
        if name.startswith("hot_"):
            body = []
            for text in lines[number + 1 :]:
                if not text.startswith("\t"):
                    break
                body.append(text[1:])
            artifacts[name] = "\n".join(body)
    return done.stderr, artifacts


def test_torch_logs_shows_every_step(traced):
    log, _ = traced
    assert "hot: joint.rewrite: 2 in" in log
    assert "hot: joint: match 2, candidates 0, price 1, plan 2" in log
    assert "hot: partitioned: layouts 0, inputs 0, advance" in log


def test_tlparse_finds_graphs_plan_and_steps(traced):
    _, artifacts = traced
    assert "hot.scaled_int_mm" in artifacts["hot_joint_rewrite_joint"]
    assert "hot_joint_exact_forms_joint" not in artifacts, "it changed nothing"
    assert len(json.loads(artifacts["hot_plan"])["decisions"]) == 2
    assert {row["scheme"] for row in json.loads(artifacts["hot_crossing"])} - {"exact"}
    assert {"hot_partitioned_store_forward", "hot_partitioned_store_backward"} <= set(artifacts)


def test_a_graph_is_read_without_its_attributes_and_keeps_its_owner():
    graph = fx.Graph()
    graph.output(graph.get_attr("constant"))
    assert "self.constant" in readable(graph)
    owner = fx.GraphModule({"constant": torch.ones(3)}, graph)
    assert "self.constant" in readable(graph)
    assert readable(owner) == readable(graph)
    assert graph.owning_module is owner


def test_inductor_may_copy_its_configuration():
    """As it does to write a trace; copies of the fake tensors that graphs hold crashed."""
    copied = []

    class Looks(CustomGraphPass):
        def __call__(self, graph):
            for name in ("joint_custom_pre_pass", "custom_partitioner_fn"):
                mine = getattr(inductor_config, name)
                copied.append(copy.deepcopy(mine) is mine)

        def uuid(self):
            return "looks"

    backend = functools.partial(hot, inner_compile=run_uncompiled)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48))
    step = torch.compile(model, backend=backend, options={"joint_custom_pre_pass": Looks()})
    step(torch.randn(64, 32)).sum().backward()
    assert copied
    assert all(copied)


def test_every_source_below_the_package_counts_for_caches(tmp_path, monkeypatch):
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "inner.py"
    file.write_text("a")
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "pipeline.py"))
    before = pipeline.sources_hash.__wrapped__()
    file.write_text("b")
    assert pipeline.sources_hash.__wrapped__() != before


def test_a_source_in_a_subfolder_is_part_of_the_identity(monkeypatch, tmp_path):
    (tmp_path / "inside").mkdir()
    source = tmp_path / "inside" / "rule.py"
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "pipeline.py"))
    digests = set()
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        digests.add(pipeline.sources_hash.__wrapped__())
    assert len(digests) == 2


@pytest.mark.parametrize("forms", [True, False])
def test_no_layout_is_forced_where_forms_are_kept(monkeypatch, forms):
    asked = []
    monkeypatch.setattr(pipeline, "lay_images", lambda *args: asked.append(args[-1]) or 0)
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    context = SimpleNamespace(config=HotConfig(exact_forms=forms), rates=None)
    pipeline._layouts(Partitioned(context, Plan("exact", ()), empty, empty, 0))
    assert asked == [forms]
