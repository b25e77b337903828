"""``lqs="auto"``: observe, recompile once, remember."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.passes.profile import Profile

ALWAYS = {"min_gain": 0, "keep_head": False, "lqs": "auto", "lqs_warm_up": 3, "lqs_batches": 2}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(model, steps, options, **keywords):
    """(losses, plan of every compilation) of ``steps`` steps."""
    reports = Reports()
    keywords = {"inner_compile": run_uncompiled, **keywords}
    backend = functools.partial(hot, options={**ALWAYS, **options}, recorder=reports, **keywords)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=draw)
        loss = F.mse_loss(compiled(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [g.plan for g in reports.graphs]


def test_observes_then_recompiles_once_with_its_choice(tmp_path):
    path = tmp_path / "p.json"
    options = {"profile": path, "error_budget": 0.02}
    losses, plans = train(net(), 12, options)
    kinds = [sorted({str(d.strategy) for d in plan}) for plan in plans]
    assert kinds == [[], ["int4"], ["int8"]]  # the observed graph, the static one, the choice
    assert "LQS: g_w error" in plans[-1]["2"].reason
    profile = Profile.load(path)
    assert set(profile.layers) == {"0", "2"}
    assert {layer.batches for layer in profile.layers.values()} == {2}
    assert losses[-1] < losses[0]
    torch._dynamo.reset()
    _, plans = train(net(), 2, options)
    assert [sorted({str(d.strategy) for d in plan}) for plan in plans] == [["int8"]]


def test_no_hla_before_it_is_measured(tmp_path):
    options = {"recipe": "fast", "profile": tmp_path / "p.json", "error_budget": 1.5}
    _, plans = train(net(), 12, options)
    assert [sorted({str(d.strategy) for d in plan}) for plan in plans] == [[], ["int4"], ["hla8"]]


def test_without_a_path_the_profile_is_kept_in_the_users_cache(tmp_path):
    train(net(), 8, {})
    (kept,) = (tmp_path / "cache" / "hot_compile" / "profiles").iterdir()
    assert set(Profile.load(kept).layers) == {"0", "2"}
    torch._dynamo.reset()
    _, plans = train(net(), 2, {})
    assert len(plans) == 1
    torch._dynamo.reset()
    train(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), 8, {})
    assert len(list(kept.parent.iterdir())) == 2  # another model is observed on its own


def test_two_graphs_share_one_file(tmp_path):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = net(), net()

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    path = tmp_path / "p.json"
    train(Broken(), 10, {"profile": path})
    profile = Profile.load(path)
    assert set(profile.layers) == {"a.0", "a.2", "b.0", "b.2"}
    assert len(profile.graphs) == 2


def test_forwards_without_backward_do_not_stall_it(tmp_path):
    path = tmp_path / "p.json"
    backend = functools.partial(
        hot, options={**ALWAYS, "profile": path}, inner_compile=run_uncompiled
    )
    compiled = torch.compile(net(), backend=backend)
    for _ in range(20):
        compiled(torch.randn(64, 64))
    assert not path.exists()  # nothing was seen: the static choice stays


def test_lowered_by_inductor_as_in_a_users_run(tmp_path):
    """Observed steps are exact; before and after, the code is Inductor's."""
    path = tmp_path / "p.json"
    script = f"""
import sys, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
options = {{"min_gain": 0, "keep_head": False, "lqs": "auto", "lqs_warm_up": 1, "lqs_batches": 1,
           "profile": {str(path)!r}}}
step = torch.compile(model, backend="hot", options=options)
x = torch.randn(64, 64)
for _ in range(5):
    model.zero_grad()
    step(x).square().mean().backward()
    print(float(model[0].weight.grad.norm()))
print(counters["stats"]["unique_graphs"])
"""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}

    def run():
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True
        )
        *norms, graphs = done.stdout.split()
        return [float(n) for n in norms], int(graphs)

    norms, graphs = run()
    assert graphs == 2  # once to observe, once for good
    assert norms[1] != norms[0]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert norms[3] == norms[4]
    assert run() == ([norms[4]] * 5, 1)
