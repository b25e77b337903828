"""The backend beside the rest of PyTorch: what trains under Inductor trains under "hot"."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports
from hot_compile.testing import cosine

ALWAYS = {"recipe": "int8", "min_gain": 0, "keep_head": False}


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.a = nn.Linear(128, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 128)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


class Broken(Net):
    def forward(self, x):
        x = F.gelu(self.a(x))
        torch._dynamo.graph_break()
        return self.c(F.gelu(self.b(x)))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def check(model, wrap=lambda model: model, context=None):
    """Gradients agree with eager's; returns how many layers each graph had rewritten."""
    x = torch.randn(64, 128)
    exact = copy.deepcopy(model)
    exact(x).square().mean().backward()
    reports = Reports()
    backend = functools.partial(hot, options=ALWAYS, recorder=reports)
    compiled = torch.compile(wrap(model), backend=backend)
    with context or torch.enable_grad():
        compiled(x).square().mean().backward()
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert cosine(got.grad, want.grad) > 0.98
    return [len(graph.plan.rewritten) for graph in reports.graphs]


def test_graph_breaks_give_two_graphs():
    assert check(Broken()) == [1, 2]


@pytest.mark.parametrize("split", [True, False])
def test_ddp_split_by_buckets_or_whole(tmp_path, split):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrap = functools.partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=1)
        with torch._dynamo.config.patch(optimize_ddp=split):
            rewritten = check(Net(width=640), wrap)
    finally:
        torch.distributed.destroy_process_group()
    assert sum(rewritten) == 3
    assert len(rewritten) > 1 if split else rewritten == [3]


def test_compiled_autograd():
    assert check(Net(), context=torch._dynamo.config.patch(compiled_autograd=True)) == [3]


def test_activation_memory_budget():
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        assert check(Net()) == [3]


def test_gradient_accumulation_over_steps():
    model, x = Net(), torch.randn(64, 128)
    compiled = torch.compile(model, backend="hot", options=ALWAYS)
    compiled(x).square().mean().backward()
    once = model.a.weight.grad.clone()
    compiled(x).square().mean().backward()
    torch.testing.assert_close(model.a.weight.grad, 2 * once)  # same inputs, same bits


def test_weight_norm_and_spectral_norm():
    model = Net()
    torch.nn.utils.parametrizations.weight_norm(model.a)
    torch.nn.utils.parametrizations.spectral_norm(model.b)
    assert check(model) == [3]


def test_transformer_encoder_layer():
    model = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    reports = Reports()
    backend = functools.partial(hot, options=ALWAYS, recorder=reports)
    torch.compile(model, backend=backend)(torch.randn(4, 9, 128)).square().mean().backward()
    names = {d.site for d in reports.graphs[0].plan.rewritten}
    assert {"linear1", "linear2", "self_attn"} <= names


def test_compiling_twice_with_different_recipes_does_not_mix():
    x = torch.randn(64, 128)
    exact, packed = Net(), Net()
    seen = {}
    for name, model in (("exact", exact), ("hot", packed)):
        reports = Reports()
        backend = functools.partial(hot, options={**ALWAYS, "recipe": name}, recorder=reports)
        torch.compile(model, backend=backend)(x).sum().backward()
        seen[name] = len(reports.graphs[0].plan.rewritten)
    assert seen == {"exact": 0, "hot": 3}
