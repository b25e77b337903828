"""Layers whose g_y is quantised once for both products, as the planner has it on Hopper, run here
by the CPU's kernels: the device's rates alone decide.
"""

import dataclasses
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.config import Strategy
from hot_compile.inspect import run_uncompiled
from hot_compile.passes.cost import devices
from hot_compile.testing import cosine, hot_step, step

RATES = dataclasses.replace(devices.RATES["cpu-vnni"], one_read=True)


@pytest.fixture(autouse=True)
def one_read(monkeypatch):
    monkeypatch.setattr(devices, "_cpu_rates", lambda: RATES)


class Block(nn.Module):
    """LayerNorm, a Linear to 3 x width of which the last third is far larger, GELU, a Linear."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        sizes = torch.tensor([0.01, 0.1, 1.0], dtype=x.dtype).repeat_interleave(x.shape[-1])
        wide = self.up(self.norm(x)) * sizes
        return x + self.down(F.gelu(wide))


def gradients(model, compiled_step):
    model.zero_grad()
    compiled_step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


class Targets:
    """Recorder of every operator of a graph's stages."""

    def __init__(self):
        self.names = {}

    def graph(self, stage, graph):
        owner = graph.graph if isinstance(graph, torch.fx.GraphModule) else graph
        if stage == "backward":
            self.sums = [n for n in owner.nodes if n.target is torch.ops.aten.sum.dim_IntList]
        names = [str(n.target) for n in owner.nodes if str(n.target).startswith("hot.")]
        self.names.setdefault(stage, []).extend(names)

    def finished(self, report):
        self.plan = report.plan


def recorded(loss, recorder, **options):
    """One step of ``loss`` that leaves its stages with ``recorder``."""
    keywords = {"recorder": recorder, "inner_compile": run_uncompiled}
    step(loss, backend=functools.partial(hot, options={"min_gain": 0, **options}, **keywords))


@pytest.mark.parametrize("strategy", ["hla8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(strategy, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(dtype)
    x = torch.randn(32, 20, 64, dtype=dtype)
    options = {"override": {"*": strategy}, "min_gain": 0}

    def loss():
        return model(x).float().square().mean()

    exact = gradients(model, lambda: loss().backward())
    seen = []

    def run():
        seen.extend(hot_step(loss, options=options)[1])

    got = gradients(model, run)
    decisions = [d for graph in seen for d in graph.plan]
    assert all(d.one_read and d.strategy is Strategy(strategy) for d in decisions)
    floor = 0.75 if strategy == "hla8" else 0.97
    assert min(cosine(got[name], exact[name]) for name in exact) > floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_gradient_comes_from_the_same_read(dtype):
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 8)
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(640, 64, dtype=dtype, requires_grad=True)  # else the first needs no g_x

    def loss():
        return model(x).float().square().mean()

    exact = gradients(model, lambda: loss().backward())
    recorder = Targets()
    got = gradients(model, lambda: recorded(loss, recorder, override={"*": "int8"}))
    # the sum of a gradient that itself is off by what the layers above quantise
    assert min(cosine(got[n], exact[n]) for n in exact if n.endswith("bias")) > 0.998
    for node in recorder.sums:
        assert node.args[0].target is operator.getitem, "g_y is read again"
    assert len(recorder.sums) == 3


class Sums(nn.Module):
    """A Linear whose bias is added by itself, so that its gradient is a sum of 3-D tensors."""

    def __init__(self):
        super().__init__()
        self.up, self.bias = nn.Linear(64, 96, bias=False), nn.Parameter(torch.zeros(96))
        self.down = nn.Linear(96, 64)

    def forward(self, x):
        return self.down(F.gelu(self.up(x) + self.bias))


def test_the_bias_gradient_is_found_behind_views():
    torch.manual_seed(0)
    model = Sums().bfloat16()
    x = torch.randn(32, 20, 64, dtype=torch.bfloat16, requires_grad=True)

    def loss():
        return model(x).float().square().mean()

    exact = gradients(model, lambda: loss().backward())
    recorder = Targets()
    got = gradients(model, lambda: recorded(loss, recorder))
    assert min(cosine(got[n], exact[n]) for n in exact) > 0.99
    assert len(recorder.sums) == 2
    assert all(node.args[0].target is operator.getitem for node in recorder.sums)


def test_a_sum_over_something_else_is_not_taken_for_a_bias():
    """Of a part of g_y's rows, of a square g_y along the other dimension, and of all of it."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 96, bias=False), torch.randn(96, 64, requires_grad=True)
    tensors = [torch.zeros(96, requires_grad=True) for _ in range(3)]

    def loss():
        y = layer(x)
        y = y + F.pad(tensors[0].expand(48, 96), (0, 0, 0, 48)) + tensors[1][:, None]
        return (y + tensors[2]).sin().square().mean()

    loss().backward()
    exact = [t.grad.clone() for t in (*tensors, layer.weight)]
    for t in (*tensors, layer.weight, x):
        t.grad = None
    hot_step(loss, options={"min_gain": 0})
    for got, want in zip((*tensors, layer.weight), exact, strict=True):
        assert cosine(got.grad, want) > 0.99


def test_two_layers_of_one_gradient_keep_both_their_biases():
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 96)]), torch.randn(640, 64)
    x.requires_grad_()

    def loss():
        return (model[0](x) + model[1](x.cos())).sin().square().mean()

    exact = gradients(model, lambda: loss().backward())
    got = gradients(model, lambda: hot_step(loss, options={"min_gain": 0}))
    assert min(cosine(got[n], exact[n]) for n in exact) > 0.99


def stages(options):
    model, x, recorder = Block(), torch.randn(32, 20, 64), Targets()
    recorded(lambda: model(x).square().mean(), recorder, **options)
    return recorder


def test_operators_of_a_stored_x():
    names = stages({"recompute": False}).names
    backward = next(found for stage, found in names.items() if "backward" in stage)
    assert backward.count("hot.quantize_one_read.default") == 2
    assert backward.count("hot.hadamard_int_mm.default") == 2
    assert backward.count("hot.rescale_int8.default") == 2
    assert "hot.quantize_grad.default" not in backward


def test_a_recomputed_x_waits_in_8_bits():
    names = stages({"recompute": True}).names
    backward = next(found for stage, found in names.items() if "backward" in stage)
    assert "hot.compress_int8.default" in backward
    assert "hot.rescale_int8.default" in backward


@pytest.mark.parametrize(
    "options", [{"gx_bits": 4}, {"recipe": "paper"}], ids=["4 bits", "per tensor"]
)
def test_others_keep_a_form_for_each_product(options):
    recorder = stages(options)
    assert not any(d.one_read for d in recorder.plan)
    assert any("hot.quantize_grad.default" in found for found in recorder.names.values())
