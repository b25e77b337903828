"""Gradients that come to cuDNN's attention lie alike where torch would run them by one plan."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.exact.attention import lay_out_alike

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 17, 8
SIZE = (BATCH, HEADS, TOKENS, WIDTH)
BY_HEAD = (HEADS * TOKENS * WIDTH, TOKENS * WIDTH, WIDTH, 1)
BY_TOKEN = (HEADS * TOKENS * WIDTH, WIDTH, HEADS * WIDTH, 1)
PART = (5 * HEADS * TOKENS * WIDTH, WIDTH, 5 * HEADS * WIDTH, 1)
"""Of a gradient that is five times as wide, as a Flux's single block has it."""
BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


def graph_of(*gradients, queries=BY_HEAD):
    """A backward of one attention for each of these strides: (graph, those attentions)."""
    graph, mode, nodes = fx.Graph(), FakeTensorMode(), []
    for number, strides in enumerate(gradients):
        given = [graph.placeholder(f"{name}{number}") for name in ("gradient", "q", "k", "v")]
        for node, its in zip(given, (strides, queries, queries, queries), strict=True):
            with mode:
                node.meta["val"] = torch.empty_strided(SIZE, its, dtype=torch.bfloat16)
        nodes.append(graph.call_function(BACKWARD, tuple(given)))
        nodes[-1].meta["val"] = tuple(n.meta["val"] for n in given[1:])
    graph.output(tuple(nodes))
    return graph, nodes


def lies(node):
    return node.args[0].meta["val"].stride()


@pytest.mark.parametrize("strides", [BY_HEAD, BY_TOKEN, PART])
def test_what_lies_alike_stays(strides):
    graph, nodes = graph_of(strides, strides)
    assert lay_out_alike(graph) == 0
    assert [lies(node) for node in nodes] == [strides, strides]


@pytest.mark.parametrize(
    ("gradients", "copied", "after"),
    [
        ((BY_TOKEN, PART, BY_TOKEN), 1, BY_TOKEN),
        ((PART, BY_TOKEN), 1, BY_TOKEN),
        ((BY_HEAD, BY_TOKEN, PART), 2, BY_HEAD),
    ],
)
def test_what_does_not_is_copied_in_the_order_of_the_first(gradients, copied, after):
    graph, nodes = graph_of(*gradients)
    before = [node.args[0] for node in nodes]
    assert lay_out_alike(graph) == copied
    assert [lies(node) for node in nodes] == [after] * len(gradients)
    assert lay_out_alike(graph) == 0
    graph.lint()
    turning = {aten.permute.default, aten.clone.default}
    assert [strip(node.args[0], turning) for node in nodes] == before


def test_other_plans_are_none_of_each_others_business():
    graph, (first, second) = graph_of(BY_TOKEN, PART)
    with first.meta["val"][0].fake_mode:
        second.args[1].meta["val"] = torch.empty_strided(SIZE, BY_TOKEN, dtype=torch.bfloat16)
    assert lay_out_alike(graph) == 0
    assert (lies(first), lies(second)) == (BY_TOKEN, PART)
