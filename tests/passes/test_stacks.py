"""Logits stacked in a new dimension: each is read on its own, and none exist as a whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_head_losses import (
    FORWARD,
    Model,
    compiled,
    distance,
    exact_without_logits,
    given_for,
    inputs,
    mean,
    outcome,
)

from hot_compile.backend import hot
from hot_compile.inspect import Reports


def both(logits, g, temperature=1.0):
    return tuple((y / temperature).log_softmax(-1) for y in (logits, g["teacher"]))


def generalised(logits, g, beta=0.3):
    """As TRL's trainer of generalised knowledge distillation has it."""
    mine, theirs = both(logits, g, temperature=2.0)
    beta = torch.tensor(beta, dtype=mine.dtype)
    weighted = [mine + torch.log(1 - beta), theirs + torch.log(beta)]
    mixed = torch.logsumexp(torch.stack(weighted), dim=0)
    one = F.kl_div(mixed, theirs, reduction="none", log_target=True)
    other = F.kl_div(mixed, mine, reduction="none", log_target=True)
    return mean((beta * one + (1 - beta) * other).sum(-1), g)


def averaged(logits, g):
    """Jensen-Shannon divergence by the chances' mean."""
    mine, theirs = both(logits, g)
    mixed = torch.stack([mine.exp(), theirs.exp()], 1).mean(1).log()
    return mean((mine.exp() * (mine - mixed) + theirs.exp() * (theirs - mixed)).sum(-1), g)


def last(logits, g):
    mixed = torch.stack(both(logits, g), -1).logsumexp(-1)
    return F.kl_div(mixed, both(logits, g)[1], reduction="batchmean", log_target=True)


def most(logits, g):
    return mean(torch.stack([logits, g["teacher"]]).amax(0).logsumexp(-1), g)


def normalised_together(logits, g):
    mine, theirs = torch.stack([logits, g["teacher"]]).log_softmax(-1)
    return mean(F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1), g)


def whole(logits, g):
    """All that is stacked goes into the loss, rows side by side."""
    log = torch.stack([logits, g["teacher"]]).flatten(1, 2).log_softmax(-1)
    mixed = log.logsumexp(0) - math.log(2)
    return (log.exp() * (log - mixed)).sum(-1).mean(0).mean() + 1e-3 * log.square().mean()


STACKED = {
    "GKD": (generalised, {}),
    "GKD from a head": (generalised, {"teacher": True, "bias": True}),
    "GKD, LoRA on the head": (generalised, {"adapted": True}),
    "averaged": (averaged, {"teacher": True}),
    "behind the columns": (last, {}),
    "larger": (most, {}),
    "normalised together": (normalised_together, {"teacher": True}),
    "as a whole": (whole, {}),
}
QUICK = ("GKD from a head", "as a whole")
CASES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STACKED]


@pytest.mark.parametrize("name", CASES)
def test_what_is_stacked_is_read_part_by_part(name, monkeypatch):
    """Exact in fp64, and no tensor of rows times the vocabulary exists."""
    loss, keywords = STACKED[name]
    exact_without_logits(monkeypatch, loss, keywords, [FORWARD], given_for())


@pytest.mark.parametrize("name", ["GKD", pytest.param("as a whole", marks=pytest.mark.slow)])
def test_batch_and_length_may_change(name):
    model, reports = Model(STACKED[name][0]).double(), Reports()
    run = compiled(model, reports)
    for rows, tokens in ((4, 32), (3, 20), (5, 11)):
        x, g = inputs(rows=rows, tokens=tokens), given_for(rows, tokens)
        for tensor in (x, g["mask"], g["teacher"]):
            torch._dynamo.mark_dynamic(tensor, (0, 1))
        for one, other in zip(outcome(run, model, x, g), outcome(model, model, x, g), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    heads = [head for graph in reports.graphs for head in graph.plan.heads]
    assert all(head.chunked for head in heads), [head.reason for head in heads]
    assert not heads[0].shape[0].isdigit()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_inductor_compiles_it(dtype):
    """About as far from fp64 as eager is."""
    model, x, g = Model(generalised).to(dtype), inputs(dtype), given_for(dtype=dtype)
    torch._dynamo.reset()
    options = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9, "strict": True}
    run = torch.compile(model, backend=hot, options=options)
    got, eager = outcome(run, model, x, g), outcome(model, model, x, g)
    exact, wide = model.double(), {k: v.double() for k, v in g.items() if v.is_floating_point()}
    truth = outcome(exact, exact, x.double(), wide)
    for one, other, want in zip(got, eager, truth, strict=True):
        assert distance(one, want) < 1.5 * distance(other, want) + 1e-3


def test_a_stack_that_is_read_otherwise_stays_and_explain_says_why():
    def loss(logits, g):
        log = torch.stack([logits, 0.5 * logits]).log_softmax(-1)
        return log.square().mean() + 1e-3 * log.cumsum(0).mean()

    model, x, reports = Model(loss).double(), inputs(), Reports()
    got = outcome(compiled(model, reports), model, x, {})
    (head,) = reports.graphs[0].plan.heads
    assert not head.chunked
    assert head.reason
    for one, other in zip(got, outcome(model, model, x, {}), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
