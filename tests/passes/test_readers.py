"""Every kind of reader that ``RULES`` has: a backward with it, and what follows for the tensor."""

import dataclasses

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from hot_compile.passes.base.graph import aten, placeholders
from hot_compile.passes.base.operators import MOVES
from hot_compile.passes.storage import readers

HEADS = (2, 4, 16, 32)  # batch, heads, rows, features


def attention_gradients(saved, tangents):
    """The backward of attention whose output, q, k and v are one tensor."""
    sums = torch.zeros(HEADS[:3])
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        tangents, saved, saved, saved, saved, sums, 0.0, False
    )


def batch_norm_gradients(saved, tangents):
    ones = torch.ones(HEADS[1])
    return aten.native_batch_norm_backward(
        tangents, saved, ones, None, None, ones, ones, True, 1e-5, [True] * 3
    )


CASES = {
    "the backward's caller": (lambda s, t: s, "returned by the backward"),
    "what asks for its size: `full_like`, a pool's backward": (
        lambda s, t: t + torch.full_like(s, 2),
        "",
    ),
    "fused attention's backward": (attention_gradients, ""),
    "a product of two activations: attention by hand": (
        lambda s, t: torch.bmm(t.flatten(0, 1).mT, s.flatten(0, 1)), ""
    ),
    "a layer's product": (lambda s, t: torch.mm(t.flatten(0, 2).mT, s.flatten(0, 2)), ""),
    "a loss inside the graph: what comes before the first product of the backward": (
        lambda s, t: t * s, "a loss stays exact"
    ),
    "a batch norm's backward": (batch_norm_gradients, ""),
    "a gradient that it is a factor of, or chooses parts of": (lambda s, t: t * s, ""),
    "any other operator with a gradient": (lambda s, t: torch.atan2(t, s), "not known"),
    "a region of `torch.utils.checkpoint`": (lambda s, t: t * (s + s.mean(-1, True)), ""),
    "a view, a cast, a move such as `cat` and `gather`": (
        lambda s, t: t * torch.cat((s[..., 1:], s[..., :1]), -1), ""
    ),
    "a product of ours": (
        lambda s, t: (torch.ops.hot.quantize_rows(s.flatten(0, 2), 8, 16, True, False), t), ""
    ),
    "a sum, a product or the like": (lambda s, t: t * s.cumsum(-1), "recomputed"),
    "a comparison": (lambda s, t: torch.where(s > 0, t, 0), ""),
    "another pointwise operator": (lambda s, t: t * s.tanh(), ""),
}  # fmt: skip
"""By its name in ``RULES``: a backward, and why the tensor must stay exact, if it must."""


def judged(monkeypatch, backward, outside=HEADS, checkpointed=False):
    """What ``backward`` reads of its first input, and the rules that counted.

    ``outside``: the shape of the gradient that it is given. ``checkpointed``: what it computes
    again is a checkpoint's.
    """
    counted = []

    def noting(rule):
        def judge(*use):
            counted.append(rule.reader)
            rule.judge(*use)

        return dataclasses.replace(rule, judge=judge)

    monkeypatch.setattr(readers, "RULES", tuple(map(noting, readers.RULES)))

    def traced(saved, tangents):
        return backward(saved, tangents)

    graph = make_fx(traced, tracing_mode="fake")(torch.randn(HEADS), torch.randn(outside)).graph
    graph.eliminate_dead_code()
    root, _ = placeholders(graph)
    if checkpointed:
        for node in graph.nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return readers.read(root, readers.facts(graph, {root.name})), counted


@pytest.mark.parametrize("rule", readers.RULES, ids=lambda rule: rule.reader)
def test_every_kind_of_reader_is_judged_by_its_rule(monkeypatch, rule):
    backward, why = CASES[rule.reader]
    outside, checkpointed = () if "loss" in why else HEADS, "checkpoint" in rule.reader
    reading, counted = judged(monkeypatch, backward, outside, checkpointed)
    assert rule.reader in counted
    assert why in reading.refusal
    assert bool(why) == bool(reading.refusal)
    assert not why or "exact" in rule.then


def test_one_line_of_the_operators_table_has_an_operator_understood(monkeypatch):
    """As a contributor adds it: a move that no rule names is followed to its readers."""

    def backward(saved, tangents):
        return tangents * saved.repeat(1, 1, 1, 1)

    unknown, _ = judged(monkeypatch, backward)
    MOVES.add(aten.repeat.default)
    try:
        known, counted = judged(monkeypatch, backward)
    finally:
        MOVES.discard(aten.repeat.default)
    assert unknown.refusal
    assert not known.refusal
    assert "a view, a cast, a move such as `cat` and `gather`" in counted


def test_of_flex_attention_whose_function_is_not_known_everything_stays_exact():
    graph = fx.Graph()
    saved, tangents = graph.placeholder("saved"), graph.placeholder("tangents_1")
    for node in (saved, tangents):
        node.meta["val"] = torch.empty(HEADS)
    given = saved, saved, saved, tangents
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention_backward, given))
    reading = readers.read(saved, readers.facts(graph, {"saved"}))
    assert "may do anything to logits" in reading.refusal
