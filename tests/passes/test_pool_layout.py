"""Gradients of max pools are written as the images around them lie, and once."""

import re

import pytest
import torch
from samples_graphs import given, pools_pay
from torch import fx, nn
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.utils import run_and_get_code

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import pool_layout
from hot_compile.passes.exact.pools import GATHERED
from hot_compile.testing import cosine

CHANNELS, SIZE = 16, 24
OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact


def net(kernel, stride):
    """A stem as a ResNet's, its images channels last."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.MaxPool2d(kernel, stride, kernel // 2 if kernel > stride else 0),
        nn.Conv2d(CHANNELS, 8, 3, bias=False),
    )
    return made.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("kernel", "stride", "count"),
    [(3, 2, 1), (2, 2, 0), pytest.param(3, 3, 0, marks=pytest.mark.slow)],
)
def test_they_are_written_channels_last(kernel, stride, count, monkeypatch, fresh_dynamo):
    pools_pay(monkeypatch)
    laid, own = [], pool_layout.lay_pools

    def spy(graph, last):
        laid.append(own(graph, last))
        return laid[-1]

    monkeypatch.setattr("hot_compile.passes.pipeline.lay_pools", spy)
    image = torch.randn(4, 3, SIZE, SIZE).to(memory_format=torch.channels_last)
    model = net(kernel, stride)
    model(image).square().mean().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="hot", options=OPTIONS)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(image).square().mean().backward())
    assert laid == [count]
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        assert cosine(parameter.grad, want) > 0.9999  # the same sums, in fp32
    if count:
        size = rf"\(4, {CHANNELS}, {SIZE}, {SIZE}\)"
        written = re.findall(rf"empty_strided_cpu\({size}, \((.*?)\)", codes[-1])
        assert set(written) <= {f"{CHANNELS * SIZE * SIZE}, 1, {CHANNELS * SIZE}, {CHANNELS}"}


@pytest.mark.parametrize(
    ("last", "layout", "laid"),
    [
        (True, torch.contiguous_format, 1),
        (False, torch.contiguous_format, 0),
        (False, torch.channels_last, 1),
    ],
)
def test_only_where_images_lie_so(last, layout, laid):
    graph = fx.Graph()
    (x,) = given(graph, {"x": ((2, 8, 4, 4), torch.float32)})
    with x.meta["val"].fake_mode:
        x.meta["val"] = x.meta["val"].to(memory_format=layout)
    part = graph.call_function(aten.neg.default, (x,))
    total = graph.call_function(aten.add.Tensor, (x, part))
    part.meta = {"val": x.meta["val"], GATHERED: False}
    total.meta = {"val": x.meta["val"], GATHERED: True}
    graph.output((total,))
    assert pool_layout.lay_pools(graph, last) == laid
    forced = graph.find_nodes(op="call_function", target=force_stride_order)
    assert len(forced) == 2 * laid
    assert all(node.meta["val"].stride() == (128, 1, 32, 8) for node in forced)
    (result,) = graph.output_node().args[0]
    assert (result in forced) == bool(laid)
    values = torch.randn(2, 8, 4, 4)
    assert torch.equal(fx.GraphModule({}, graph)(values)[0], torch.zeros(2, 8, 4, 4))
