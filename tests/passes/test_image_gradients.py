"""What a convolution's backward reads lies channels last."""

import operator
import re

import pytest
import torch
from samples_graphs import given
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from hot_compile.passes import pipeline
from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import image_gradients
from hot_compile.passes.exact.image_gradients import lay_as_images
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD
from hot_compile.testing import cosine

BATCH, CHANNELS, SIZE = 4, 32, 12
OPTIONS = {"min_gain": 99, "memory": "all", "memory_min_bytes": 1024}  # exact layers


class Split(nn.Module):
    """Parts of an image go ways of their own, as in a DPN; a mean is taken at the end."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.two = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)

    def forward(self, image):
        x = self.one(image)
        added, joined = x[:, :16], x[:, 16:]
        x = torch.cat([added + image[:, :16], joined.relu()], 1)
        return self.two(x).mean((2, 3)).square().mean()


def backward_of(net, image):
    """(gradients, strides of the images that the backward's kernels write)."""
    net.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="hot", options=OPTIONS)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (_, code) = run_and_get_code(lambda: compiled(image).backward())
    size = rf"\({BATCH}, {CHANNELS}, {SIZE}, {SIZE}\)"
    written = re.findall(rf"empty_strided_cpu\({size}, \((.*?)\)", code)
    return [p.grad.clone() for p in net.parameters()], set(written)


SINCE = pytest.mark.skipif(torch.__version__ >= (2, 15), reason="Inductor writes none here")


@pytest.mark.slow
@pytest.mark.parametrize("laid", [True, pytest.param(False, marks=SINCE)])
def test_no_gradient_that_a_convolution_reads_has_its_channels_first(monkeypatch, laid):
    if not laid:  # what it is for
        monkeypatch.setattr(pipeline, "lay_as_images", lambda graph: 0)
    torch.manual_seed(0)
    net, image = Split(), torch.randn(BATCH, CHANNELS, SIZE, SIZE)
    net(image).backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    found, written = backward_of(net, image)
    last, first = f"{CHANNELS * SIZE**2}, 1, {CHANNELS * SIZE}, {CHANNELS}", "4608, 144, 12, 1"
    assert written == ({last} if laid else {last, first})
    for gradient, want in zip(found, wanted, strict=True):
        assert cosine(gradient, want) > 0.99


class Mixed(nn.Module):
    """Parts of an image go through depthwise convolutions of their own, as in a MixNet."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        half = CHANNELS // 2
        sizes = (3, 5)
        self.parts = nn.ModuleList(
            nn.Conv2d(half, half, n, padding=n // 2, groups=half, bias=False) for n in sizes
        )

    def forward(self, image):
        parts = self.one(image).relu().chunk(2, 1)
        return torch.cat([conv(x) for conv, x in zip(self.parts, parts, strict=True)], 1).square()


def test_parts_of_an_image_have_the_gradients_they_had(monkeypatch):
    monkeypatch.setattr(image_gradients, "_on_gpu", lambda read: True)
    torch.manual_seed(0)
    net, image = Mixed(), torch.randn(BATCH, CHANNELS, SIZE, SIZE)
    net(image).mean().backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="hot", options={"min_gain": 99, "memory": "off"})
    compiled(image).mean().backward()
    for p, want in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want)


def graph_of(source, size=SIZE, device="cuda"):
    """A convolution's backward, and what gives the gradient that comes to it."""
    graph, size = fx.Graph(), (BATCH, CHANNELS, size, size)
    named = {"g": (size, torch.float32), "x": (size, torch.float32)}
    g, x, w = given(graph, named | {"w": ((CHANNELS, CHANNELS, 1, 1), torch.float32)}, device)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    gradient = source(graph, g, (x, w, *rest))
    last = graph.call_function(CONVOLUTION_BACKWARD, (gradient, x, w, *rest))
    last.meta["val"] = (x.meta["val"], w.meta["val"], None)
    return graph, last, gradient


def behind_another(graph, g, others):
    """Nothing between two convolutions."""
    node = graph.call_function(CONVOLUTION_BACKWARD, (g, *others))
    node.meta["val"] = (g.meta["val"], None, None)
    part = graph.call_function(operator.getitem, (node, 0))
    part.meta["val"] = g.meta["val"]
    return part


def copied(graph, g, others):
    """A pool's or a stem's, which is laid so already."""
    layout = {"memory_format": torch.channels_last}
    node = graph.call_function(aten.clone.default, (g,), layout)
    node.meta["val"] = g.meta["val"]
    return node


def test_each_is_copied_once():
    graph, last, gradient = graph_of(lambda graph, g, others: g)
    image = last.args[1]
    assert lay_as_images(graph) == 2
    assert [copy.args for copy in last.args[:2]] == [(gradient,), (image,)]
    for copy in last.args[:2]:
        assert copy.target is aten.clone.default
        assert copy.meta["val"].is_contiguous(memory_format=torch.channels_last)
    assert lay_as_images(graph) == 0


def test_on_a_cpu_images_are_read_as_they_lie():
    graph, last, _ = graph_of(lambda graph, g, others: g, device="cpu")
    image = last.args[1]
    assert lay_as_images(graph) == 1
    assert last.args[1] is image


def test_images_of_one_position_are_left_as_they_are():
    graph, last, _ = graph_of(lambda graph, g, others: g, size=1)
    before = last.args
    assert lay_as_images(graph) == 0
    assert last.args == before


def test_what_two_convolutions_read_is_copied_once():
    graph, last, _ = graph_of(lambda graph, g, others: g)
    other = graph.call_function(CONVOLUTION_BACKWARD, last.args)
    other.meta["val"] = last.meta["val"]
    assert lay_as_images(graph) == 2
    assert last.args[:2] == other.args[:2]


@pytest.mark.parametrize(("source", "others"), [(behind_another, 1), (copied, 0)])
def test_what_lies_so_is_not_copied(source, others):
    graph, last, gradient = graph_of(source)
    assert lay_as_images(graph) == others + 1  # what comes to the other convolution; the image
    assert last.args[0] is gradient
