"""Boundaries of checkpointed regions in a compiled graph: rounded, and looked at."""

import functools

import pytest
import torch
from samples_storage import Block, crossing
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_compile.backend import hot
from hot_compile.memory import held_bytes
from hot_compile.observing import acceptance
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine

LAYERS_EXACT = {"override": {"*": "exact"}}


class Words(nn.Module):
    """A language model of checkpointed blocks; ``outliers``: columns of its residual stream are a
    hundred times as large as the rest, and norms bring them back, as trained models do."""

    def __init__(self, *blocks, outliers=False, **checkpointing):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(512, 128), nn.ModuleList(blocks)
        self.head = nn.Linear(128, 64)
        self.checkpointing = {"use_reentrant": False, **checkpointing}
        if outliers:
            columns, norms = [3, 70], [m for m in self.modules() if isinstance(m, nn.LayerNorm)]
            with torch.no_grad():
                self.embed.weight[:, columns] *= 100
                for norm in norms:
                    norm.weight[columns] /= 100

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, **self.checkpointing)
        return self.head(x).square().mean()


def boundaries(model, **options):
    """What crosses of the residual stream, and the gradients under ``options``."""
    torch.manual_seed(1)
    model.zero_grad()
    ids = torch.randint(0, 512, (4, 48))
    kept = crossing(model, ids, **LAYERS_EXACT, **options)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [c for c in kept if c.shape == ("4", "48", "128")], gradients


@pytest.mark.parametrize("outliers", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "block", [{"rotary": True, "kv_heads": 2, "causal": True}, {"dropout": 0.1}]
)
def test_boundaries_are_stored_in_six_bits(block, outliers):
    torch.manual_seed(0)
    model = Words(*(Block(**block) for _ in range(3)), outliers=outliers)
    exact, want = boundaries(model, memory="off")
    kept, got = boundaries(model)
    assert len(kept) >= 2
    assert {c.scheme for c in kept if c.module != "embed"} == {"groups6"}
    assert [c.scheme for c in kept if c.module == "embed"] == ["rows8"], "the first block's"
    assert sum(c.bytes for c in kept) < 0.23 * sum(c.bytes_before for c in kept)
    assert sum(c.bytes for c in exact) == sum(c.bytes_before for c in kept)
    assert min(cosine(got[name], want[name]) for name in want) > 0.99


@pytest.mark.slow
def test_more_bits_are_closer():
    torch.manual_seed(0)
    model = Words(*(Block() for _ in range(2)))
    _, want = boundaries(model, memory="off")
    closest = []
    for bits in (4, 6, 8):
        kept, got = boundaries(model, memory_bits=bits)
        scheme = {4: "int4", 6: "groups6", 8: "rows8"}[bits]
        assert {c.scheme for c in kept if c.module != "embed"} == {scheme}
        closest.append(min(cosine(got[name], want[name]) for name in want))
    assert closest == sorted(closest)
    assert closest[-1] > 0.9995


def test_a_boundary_gets_the_bits_that_a_monitor_asks_for():
    """By the same option, by the module that made it or by its name in a profile."""
    torch.manual_seed(0)
    kept, _ = boundaries(Words(Block(), Block(), Block()), memory_override={"blocks.1*": 8})
    found = {c.module: c.scheme for c in kept}
    assert found == {"embed": "rows8", "blocks.0": "groups6", "blocks.1": "rows8"}


class Around(nn.Module):
    """A residual layer of ``function`` behind a norm."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.layer, self.function = nn.LayerNorm(128), nn.Linear(128, 128), function

    def forward(self, x):
        return x + self.layer(self.function(self.norm(x)))


FUNCTIONS = {
    "steep": lambda x: torch.sin(30 * x),
    "poles": lambda x: (x.abs() + 1e-3).log(),
    "sorted": lambda x: x.sort(-1).values,
}


@pytest.mark.parametrize("name", ["steep", pytest.param("poles", marks=pytest.mark.slow), "sorted"])
def test_what_jumps_is_repaired_by_the_ninth_step(name, tmp_path, monkeypatch):
    """No rule knows which regions tolerate a rounded boundary: gradients are compared."""
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path)
    torch.manual_seed(0)
    model = Words(*(Around(FUNCTIONS[name]) for _ in range(3)))
    ids = torch.randint(0, 512, (4, 48))

    def trained(steps, **options):
        torch._dynamo.reset()
        options = {"min_gain": 0, "accept": "auto", **options}
        backend = functools.partial(hot, options=options, inner_compile=run_uncompiled)
        step = torch.compile(model, backend=backend)
        for _ in range(steps):
            model.zero_grad()
            step(ids).backward()
        return [p.grad.clone() for p in model.parameters()]

    want, got = trained(1, recipe="exact", accept="off"), trained(9)
    largest = max(w.norm() for w in want)
    found = [pair for pair in zip(got, want, strict=True) if pair[1].norm() > 1e-3 * largest]
    assert max(((g - w).norm() / w.norm()).item() for g, w in found) < 0.25
    assert min(cosine(g, w) for g, w in found) > 0.97


def blockwise(model, ids, around=checkpoint, **options):
    """What crosses of blocks' inputs where each block is a graph of its own, bytes that autograd
    holds, and gradients."""
    torch._dynamo.reset()
    model.zero_grad()
    reports, x = Reports(), model.embed(ids)
    given = {"memory_min_bytes": 1, **LAYERS_EXACT, **options}
    backend = functools.partial(hot, options=given, recorder=reports, inner_compile=run_uncompiled)
    for block in model.blocks:
        region = functools.partial(around, block, use_reentrant=False)
        x = torch.compile(region, backend=backend)(x)
    loss = model.head(x).square().mean()
    held = held_bytes(loss, model, ids)
    loss.backward()
    kept = [
        c for report in reports.graphs for c in report.crossing if c.shape == ("4", "48", "128")
    ]
    return kept, held, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_an_input_that_another_graph_made_is_a_boundary():
    """As where FSDP2's blocks are checkpointed and compiled one by one."""
    torch.manual_seed(0)
    model, ids = Words(*(Block() for _ in range(3)), outliers=True), torch.randint(0, 512, (4, 48))
    _, exact, want = blockwise(model, ids, memory="off")
    (boundary,), held, got = blockwise(model, ids)  # all blocks are one graph
    assert boundary.scheme == "rows8", "nobody knows which is the first block"
    assert exact - held >= 3 * (boundary.bytes_before - boundary.bytes)
    assert min(cosine(got[name], want[name]) for name in want) > 0.999
    assert any(not torch.equal(got[name], want[name]) for name in want)


def test_an_input_of_the_user_s_stays():
    torch.manual_seed(0)
    model = Words(Block())
    model.embed = nn.Identity()
    for wanted in (False, True):
        kept, *_ = blockwise(model, torch.randn(4, 48, 128, requires_grad=wanted))
        assert not kept
