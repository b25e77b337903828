"""Boundaries of checkpointed regions in a compiled graph: rounded where the region allows it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from samples_storage import Block, crossing
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hot_compile.backend import hot
from hot_compile.memory import held_bytes
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


@pytest.mark.parametrize("outliers", [False, True])
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


def choose(x):
    values, places = x.topk(32, -1)
    return torch.zeros_like(x).scatter(-1, places, values)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (choose, "may jump (aten."),
        (lambda x: torch.sin(30 * x), "may jump (aten.sin"),
        (lambda x: torch.exp(x), "may jump (aten.exp"),
        (lambda x: torch.round(x) * x, "may jump (aten.round"),
        (lambda x: torch.where(x > x.roll(1, -1), x, 0.0), "compares two of its values"),
    ],
)
def test_a_region_that_is_not_gentle_keeps_its_boundary(function, why):
    torch.manual_seed(0)
    kept, _ = boundaries(Words(Around(function), Around(function)))
    assert kept
    assert all(c.scheme == "exact" and why in c.reason for c in kept), kept


@pytest.mark.parametrize("function", [F.silu, F.gelu, lambda x: x.relu().softmax(-1).tanh()])
def test_a_gentle_one_does_not(function):
    torch.manual_seed(0)
    kept, _ = boundaries(Words(Around(function), Around(function)))
    assert {c.scheme for c in kept} == {"rows8", "groups6"}, kept


def test_attention_that_is_kept_beside_keeps_the_boundary():
    """Selective checkpointing: the output is exact, so its backward wants queries that are."""

    def policy(context, op, *args, **kwargs):
        kept = "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    kept, _ = boundaries(Words(Block(), Block(), context_fn=context))
    assert any("was kept, its operands are computed again" in c.reason for c in kept), kept


def test_a_loss_in_a_region_keeps_its_boundary():
    torch.manual_seed(0)
    layer, head = nn.Linear(128, 128), nn.Linear(128, 64)

    def loss(x):
        x = layer(x).tanh()
        return checkpoint(lambda x: head(x).sigmoid().log().mean(), x, use_reentrant=False)

    kept = crossing(loss, torch.randn(4, 48, 128))
    assert all(c.scheme == "exact" for c in kept if c.shape == ("4", "48", "128")), kept


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
