"""Held bytes against the allocator's own account."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hot_compile.memory import held_bytes, held_tensors, peak_bytes


def _model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_equals_what_the_allocator_kept(backend):
    torch._dynamo.reset()
    model, x = _model(), torch.randn(256, 64)
    step = torch.compile(model, backend=backend)
    step(x).sum().backward()  # compile outside of the profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = step(x).sum()
    kept = sum(event.self_cpu_memory_usage for event in prof.key_averages())
    assert held_bytes(loss, model, x) == kept - loss.nbytes


def test_parameters_buffers_and_inputs_are_not_counted():
    model, x = nn.Linear(64, 32), torch.randn(16, 64)
    assert held_bytes(model(x), model, [{"x": x}]) == 0
    assert held_bytes(model(x), model) == x.nbytes


def test_views_of_one_storage_count_once():
    q, k = nn.Linear(64, 128)(torch.randn(16, 64)).chunk(2, dim=-1)
    held = held_tensors(q * k, nn.Identity())
    assert len([t for t in held if t.untyped_storage().nbytes() == 16 * 128 * 4]) == 1


def test_no_backward_holds_nothing():
    model, x = _model(), torch.randn(8, 64)
    with torch.no_grad():
        assert held_bytes(model(x), model, x) == 0
    assert held_bytes({"not": "a tensor"}, model, x) == 0


def test_peak_is_the_highest_point_not_the_sum():
    def call():
        for _ in range(4):
            torch.empty(1 << 20, dtype=torch.uint8)
        return torch.empty(3 << 20, dtype=torch.uint8)

    peak = peak_bytes(call, torch.device("cpu"))
    assert 3 << 20 <= peak <= 4 << 20
