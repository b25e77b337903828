"""Golden graphs: each stage's output as reviewable text.

After an intended change, rerun with ``ACCEPT=1`` in the environment and review the diff.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.testing import step

EXPECTED = Path(__file__).parent / "expected"


def listing(graph: fx.Graph) -> str:
    """One line a node, numbered in order, operands by number: free of torch's own naming."""
    numbers, lines = {}, []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        text = ", ".join(str(a) for a in args[0]) + "".join(
            f", {k}={v}" for k, v in args[1].items()
        )
        target = node.target if isinstance(node.target, str) else _name(node.target)
        value = node.meta.get("val")
        shape = f" : {_type(value)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{numbers[node]} = {node.op} {target}({text}){shape}")
    return "\n".join(lines) + "\n"


def _name(target):
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


def _type(value):
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


class Stages:
    """Recorder that keeps each stage's listing."""

    def __init__(self):
        self.listings = {}

    def graph(self, stage, graph):
        owner = graph.graph if isinstance(graph, fx.GraphModule) else graph
        self.listings[stage] = listing(owner)

    def finished(self, report):
        self.plan = report.plan


@pytest.mark.parametrize("recipe", ["hot", "paper"])
def test_each_stage_is_as_reviewed(recipe):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48, bias=False))
    stages = Stages()

    def backend(gm, inputs):
        options = {"recipe": recipe, "min_gain": 0, "keep_head": False}
        return hot(gm, inputs, options=options, recorder=stages, inner_compile=run_uncompiled)

    step(lambda x: model(x).sum(), torch.randn(5, 8, 32), backend=backend)
    for stage, got in stages.listings.items():
        file = EXPECTED / f"{recipe}.{stage}.txt"
        if os.environ.get("ACCEPT"):
            file.write_text(got)
        assert got == file.read_text(), f"{file.name} changed; rerun with ACCEPT=1 if intended"
    assert set(stages.listings) == {"joint.before", "joint.after", "forward", "backward"}
