"""Looks leave cuDNN's attention alone: torch keeps its plans without gradients' strides."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.observing import walk


def scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, enable_gqa=False):
    """Tells whether cuDNN's may be chosen."""
    scaled_dot_product_attention.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p)


@pytest.mark.parametrize(
    ("given", "cudnn"),
    [
        ({}, False),
        ({"attn_mask": True}, False),
        ({"attn_mask": True, "enable_gqa": True}, True),  # nobody else does without all scores
        ({"dropout_p": 0.1}, True),  # others would drop otherwise
    ],
)
def test_a_look_computes_attention_without_cudnn(given, cudnn):
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    q.meta["example_value"] = torch.randn(1, 2, 4, 8)
    given = {**given, "attn_mask": q} if "attn_mask" in given else given
    attention = graph.call_function(scaled_dot_product_attention, (q, q, q), given)
    graph.output((attention,))
    scaled_dot_product_attention.cudnn = []
    before = torch.backends.cuda.cudnn_sdp_enabled()
    runs = walk._Autocasts(torch.fx.Interpreter(torch.fx.GraphModule(nn.Module(), graph)), False)
    runs._interpreter.env = {q: torch.randn(1, 2, 4, 8)}
    if "attn_mask" in given:
        attention.update_kwarg("attn_mask", mask := graph.placeholder("mask"))
        runs._interpreter.env[mask] = torch.randn(4, 4)
    with runs:
        runs.run(attention)
    assert scaled_dot_product_attention.cudnn == [cudnn]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
