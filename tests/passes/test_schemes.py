"""A scheme is a row of the table: one of five bits is added here as a contributor would add it."""

import pytest
import torch
from samples_packing import AS_ON_GPU, restored, round_trip, values
from samples_storage import ALL
from torch import nn

from hot_compile.passes.base.schemes import SPECS, Kind, Scheme, Spec, Unit
from hot_compile.passes.storage import choose
from hot_compile.passes.storage import pack as packing
from hot_compile.testing import cosine, hot_step

ROW = Spec(Unit.GROUP, 5, 2, 14, 0.1, pieces=8, meets=frozenset({Kind.RELATIVE}))


@pytest.fixture
def five(monkeypatch):
    """A name and a row, finer than INT4's: all that it takes."""
    name = str.__new__(Scheme, "groups5")  # as a line in the enumeration would make it
    name._name_, name._value_ = "GROUPS5", "groups5"
    monkeypatch.setitem(Scheme._value2member_map_, "groups5", name)
    rows = dict(SPECS)
    SPECS.clear()
    for scheme, spec in rows.items():
        SPECS.update({name: ROW, scheme: spec} if scheme is Scheme.INT4 else {scheme: spec})
    yield name
    SPECS.clear()
    SPECS.update(rows)


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_packed_and_restored(five, compiled):
    x = values((15, 3, 128), torch.float32, seed=1, spread=2.0)
    parts, y = round_trip(x, five, compiled)
    assert sum(part.nbytes for part in parts) == x.numel() * 5 // 8 + x.numel() // 128 * 2
    assert (y - x).norm() / x.norm() < ROW.error


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_by_a_gpus_operators(five, layout, monkeypatch):
    x = values((3, 32, 8, 32), torch.float32, seed=2, spread=2.0).to(memory_format=layout)
    _, mine = round_trip(x, five)
    monkeypatch.setattr(packing, "_on_gpu", lambda _: True)
    (upper, lower, _), theirs = round_trip(x, five)
    assert (upper.dtype, lower.dtype) == (torch.int32, torch.uint8)
    assert ((mine != theirs).float().mean()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_on_a_gpu(five, layout):
    x = values((3, 32, 8, 32), torch.float32, seed=2, spread=2.0).to(memory_format=layout)
    _, mine = round_trip(x, five)
    (upper, _, _), theirs = round_trip(x.cuda(), five, compiled=True)
    assert upper.dtype == torch.int32
    assert (mine != theirs.cpu()).float().mean() < 1e-3


def test_by_their_lowering(five, monkeypatch):
    monkeypatch.setattr(packing, "_on_gpu", lambda _: True)
    x = values((15, 192), torch.float32, seed=6, spread=2.0)
    parts, y = round_trip(x, five)
    with torch._inductor.config.patch(AS_ON_GPU):
        got = torch.compile(lambda *p: restored(five, p, x).flip(0) + 1, dynamic=False)(*parts)
    torch.testing.assert_close(got, y.flip(0) + 1, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_chosen_and_trains(five, lower, monkeypatch):
    monkeypatch.setattr(choose, "TRUSTED_BITS", 5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
    x, target = torch.randn(256, 128), torch.randn(256, 64)
    (model(x) * target).mean().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    options = {**ALL, "exclude": "*"}
    loss = lambda x: (model(x) * target).mean()  # noqa: E731
    _, (graph,) = hot_step(loss, x, options=options, lower=lower)
    assert "groups5" in {c.scheme for c in graph.crossing}
    assert all(cosine(p.grad, want[n]) > 0.98 for n, p in model.named_parameters())
