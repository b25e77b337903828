"""Which gradients were put together of parts: what a fused qkv's g_y looks like."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.layers.fused import put_together

WHOLE = (4, 12)


def scattered(part, start):
    """``part`` in its place among zeros, as the backward of a slice leaves it."""
    return aten.slice_scatter.default(part.new_zeros(WHOLE), part, 1, start, start + 4)


@pytest.mark.parametrize(
    ("function", "is_so"),
    [
        (lambda q, k, v: torch.cat((q, k, v), 1), True),
        (lambda q, k, v: torch.cat((q, k, v), 1).reshape(2, 2, 12).bfloat16(), True),
        (lambda q, k, v: scattered(q, 0) + scattered(k, 4) + scattered(v, 8), True),
        (lambda q, k, v: scattered(q, 0) + torch.cat((v, k, q), 1).sin(), False),
        (lambda q, k, v: torch.cat((q, k, v), 1) * 2, False),
        (lambda q, k, v: q + k, False),
    ],
)
def test_put_together(function, is_so):
    gm = make_fx(function, tracing_mode="fake")(*(torch.randn(4, 4) for _ in range(3)))
    made = gm.graph.output_node().args[0]
    assert put_together(made) is is_so


def test_more_parts_than_a_layer_has_are_no_parts():
    gm = make_fx(lambda x: sum(scattered(x, 0) for _ in range(12)))(torch.randn(4, 4))
    assert not put_together(gm.graph.output_node().args[0])
