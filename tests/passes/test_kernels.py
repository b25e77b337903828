"""What Inductor lays out anew of a convolution's kernel is not what is kept for the backward."""

import copy

import pytest
import torch
from torch import nn

from hot_compile.memory import held_tensors
from hot_compile.passes import pipeline
from hot_compile.testing import cosine

OPTIONS = {"min_gain": 0, "accept": "off", "strict": True, "memory": "all", "memory_min_bytes": 0}


@pytest.mark.slow
@pytest.mark.parametrize("themselves", [True, False])
def test_kept_kernels_are_the_parameters(themselves, monkeypatch):
    if not themselves:
        monkeypatch.setattr(pipeline, "keep_themselves", lambda forward: 0)
    torch.manual_seed(0)
    convs = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, bias=False))
    net, x = nn.Sequential(*convs, nn.BatchNorm2d(32), nn.ReLU()), torch.randn(8, 3, 14, 14)
    exact = copy.deepcopy(net)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="hot", options=OPTIONS)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, torch.autocast("cpu", torch.bfloat16):
        want, loss = (call(x).square().mean() for call in (exact, compiled))
    kernels = [t for t in held_tensors(loss, net, x) if t.shape[2:] == (3, 3)]
    assert {t.dtype for t in kernels} == (set() if themselves else {torch.float32})
    for each in (want, loss):
        each.backward()
    assert cosine(net[3].weight.grad, exact[3].weight.grad) > 0.99
