"""Held bytes against the allocator's own account."""

import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hot_compile import memory_report
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


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_what_is_sparse_counts_by_its_parts(layout):
    matrix = torch.eye(8).to_sparse(layout=layout)
    weight = torch.randn(8, 4, requires_grad=True)
    kept = held_bytes(matrix @ weight, nn.Module())
    parts = 8 * 4 + 8 * 8 * (2 if layout == torch.sparse_coo else 1)
    assert kept >= parts


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


def test_report_predicts_what_is_measured(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))
    x = torch.randn(2048, 256)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, random = model[0].weight.grad, torch.get_rng_state()
    report = memory_report(model, x, options={"keep_head": False})
    assert model[0].weight.grad is before
    assert (before == 1).all()
    assert model[-1].weight.grad is None
    assert torch.equal(random, torch.get_rng_state())
    exact, recompute, hot = (report.measured[k] for k in ("exact", "exact+recompute", "hot"))
    assert hot.held < 0.5 * recompute.held <= 0.5 * exact.held
    assert hot.peak < recompute.peak
    held_by_the_loss = 2048 * 64 * 4  # the squares, outside of the compiled graph
    assert report.predicted_held_bytes == pytest.approx(hot.held - held_by_the_loss, rel=0.05)
    report.save_json(tmp_path / "memory.json")
    data = json.loads((tmp_path / "memory.json").read_text())
    assert data["measured"]["hot"]["held"] == hot.held
    assert "exact+recompute" in str(report)


@pytest.mark.slow
def test_report_of_a_vision_transformer():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=10)
    report = memory_report(model, torch.randn(8, 3, 224, 224))
    exact, recompute, hot = (report.measured[k] for k in ("exact", "exact+recompute", "hot"))
    ours = hot.held - hot.copies
    assert report.predicted_held_bytes == pytest.approx(ours, rel=0.05)
    assert ours < 0.25 * (exact.held - exact.copies)
    assert ours < 0.4 * (recompute.held - recompute.copies)
    assert hot.held < 0.4 * exact.held


def test_report_wants_a_scalar_it_can_make():
    class Nothing(nn.Linear):
        def forward(self, x):
            super().forward(x)
            return "no tensor"

    with pytest.raises(TypeError, match="loss_fn"):
        memory_report(Nothing(4, 4), torch.randn(2, 4))
