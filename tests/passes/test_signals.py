"""Convolutions of signals as those of images one row high: same values, laid channels last."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_compile.passes import pipeline
from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import signals
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD
from hot_compile.passes.storage import layout
from hot_compile.testing import hot_step

EXACT = {"min_gain": 99, "memory": "off"}
STORED = {"min_gain": 99, "memory": "all", "memory_min_bytes": 1024}
CHANNELS = 16


class Signal(nn.Module):
    """Strides, paddings, dilations, groups, depths of one, a transposed one; and norms between."""

    def __init__(self):
        super().__init__()
        wide = CHANNELS
        self.first = nn.Conv1d(1, wide, 10, 5, bias=False)
        self.norm = nn.GroupNorm(wide, wide)
        self.second = nn.Conv1d(wide, wide, 3, 2)
        self.grouped = nn.Conv1d(wide, wide, 5, padding=4, dilation=2, groups=4)
        self.depthwise = nn.Conv1d(wide, wide, 7, padding=3, groups=wide)
        self.up = nn.ConvTranspose1d(wide, 8, 4, 2, 1, output_padding=1, dilation=2)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.norm(self.first(x)))))
        x = x + F.gelu(self.grouped(x))
        return self.last(self.up(self.depthwise(x).relu()).transpose(1, 2))


@pytest.fixture
def asked(monkeypatch):
    """What the clock was asked; it says yes."""
    seen = []

    def wins(nodes, turned, rates, signals=False):
        seen.append((len(nodes), turned, signals))
        return True

    monkeypatch.setattr(signals, "channels_last_wins", wins)
    return seen


@pytest.fixture
def convolved(monkeypatch):
    """Operands of the joint graph's convolutions and their backwards, once they are as images."""
    found, own = [], signals.as_images

    def as_images(graph, rates):
        done = own(graph, rates)
        for node in graph.nodes:
            if node.target in (aten.convolution.default, CONVOLUTION_BACKWARD):
                lead = 2 if node.target is aten.convolution.default else 3
                found.append([arg.meta["val"] for arg in node.args[:lead]])
        return done

    monkeypatch.setattr("hot_compile.passes.pipeline.as_images", as_images)
    return found


def gradients(net):
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def made(*size):
    torch.manual_seed(0)
    net, x = Signal(), torch.randn(*size)
    loss = lambda x: net(x).square().mean()  # noqa: E731
    loss(x).backward()
    return net, x, loss, gradients(net)


@pytest.mark.parametrize("size", [(3, 1, 1000), (1, 1, 197), (2, 1, 15 * 17)])
def test_gradients_are_right_and_all_lies_channels_last(asked, convolved, size):
    net, x, loss, want = made(*size)
    hot_step(loss, x, options=EXACT)
    for name, got in gradients(net).items():
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)
    assert len(convolved) == 10
    assert asked == [(10, 4 * x.numel(), True)]  # it comes from outside, channels first
    for operands in convolved:
        for operand in operands:
            assert operand.shape[2] == 1
            assert operand.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("change", ["clock", "option"])
def test_else_they_stay(monkeypatch, asked, convolved, change):
    _, x, loss, _ = made(3, 1, 1000)
    if change == "clock":
        monkeypatch.setattr(signals, "channels_last_wins", lambda *_, **__: False)
    hot_step(loss, x, options=EXACT | {"exact_forms": change == "clock"})
    assert {operand.dim() for operands in convolved for operand in operands} <= {3}
    assert asked == []


def test_no_gpu_no_image(convolved):
    _, x, loss, _ = made(3, 1, 1000)
    hot_step(loss, x, options=EXACT)
    assert {operand.dim() for operands in convolved for operand in operands} == {3}


def test_images_alone_are_not_asked_for(asked):
    net = nn.Conv2d(8, 8, 3)
    hot_step(lambda x: net(x).square().mean(), torch.randn(2, 8, 9, 9), options=EXACT)
    assert asked == []


def test_sizes_that_change_are_not_asked_for(asked):
    """No guard comes of it: another length runs by the same code."""
    torch.manual_seed(0)
    net = nn.Conv1d(8, 16, 3, 2, groups=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(net, backend="hot", options=EXACT | {"accept": "off"}, dynamic=True)
    for size in ((4, 8, 33), (3, 8, 24)):
        step(torch.randn(size)).square().mean().backward()
    assert asked == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("together", [True, False])
def test_images_beside_them_are_asked_for_too(monkeypatch, asked, convolved, together):
    """Inductor will lay those channels last as well."""
    wins = signals.channels_last_wins
    both = lambda nodes, *given, **how: wins(nodes, *given, **how) and (together or len(nodes) == 2)  # noqa: E731
    monkeypatch.setattr(signals, "channels_last_wins", both)
    image, signal = nn.Conv2d(4, 8, 3), nn.Conv1d(8, 8, 3)
    loss = lambda x: signal(image(x).flatten(2)).square().mean()  # noqa: E731
    hot_step(loss, torch.randn(2, 4, 9, 9), options=EXACT)
    assert asked == [(2, 0, True), (4, 0, True)]
    dims = {operand.dim() for operands in convolved for operand in operands}
    assert dims == ({4} if together else {3, 4})


def test_a_result_has_the_strides_it_had(asked):
    torch.manual_seed(0)
    net, x = nn.Conv1d(8, 16, 3), torch.randn(2, 8, 33, requires_grad=True)
    torch._dynamo.reset()
    step = torch.compile(net, backend="hot", options=EXACT | {"accept": "off"})
    with torch._inductor.config.patch(force_disable_caches=True):
        y = step(x)
    y.square().mean().backward()
    assert asked
    assert y.stride() == net(x).stride()
    assert x.grad.stride() == x.stride()


def test_in_a_checkpointed_region(asked, convolved):
    net, x, _, want = made(3, 1, 1000)
    loss = lambda x: checkpoint(net, x, use_reentrant=False).square().mean()  # noqa: E731
    _, (graph,) = hot_step(loss, x, options=EXACT)
    assert not [c for c in graph.crossing if c.shape[0] == "3" and c.bytes > 4 * x.numel()]
    for name, got in gradients(net).items():
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)
    assert {operand.dim() for operands in convolved for operand in operands} == {4}


def test_what_crosses_is_stored_as_an_image_lies(asked):
    """By groups along positions: each channel has scales of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(64, 64, 3), nn.GELU(), nn.Conv1d(64, 64, 3), nn.GELU())
    x = torch.randn(4, 64, 260)
    loss = lambda x: net(x).square().mean()  # noqa: E731
    loss(x).backward()
    want = gradients(net)
    _, (graph,) = hot_step(loss, x, options=STORED)
    stored = [c for c in graph.crossing if c.scheme != "exact"]
    assert {tuple(c.shape) for c in stored} >= {("4", "64", "1", "258")}
    for name, got in gradients(net).items():
        assert F.cosine_similarity(got.flatten(), want[name].flatten(), 0) > 0.995, name


def test_the_clock_is_asked_once(asked, monkeypatch):
    """Inductor lays them so by what was found of the joint graph."""
    marked, own = [], pipeline.lay_images

    def lay_images(forward, *others):
        done = own(forward, *others)
        marked.append(layout.CHANNELS_LAST in forward.meta)
        return done

    monkeypatch.setattr(pipeline, "lay_images", lay_images)
    monkeypatch.setattr(layout, "channels_last_wins", lambda *_: False)
    _, x, loss, _ = made(3, 1, 1000)
    with torch.backends.mkldnn.flags(enabled=False):
        hot_step(loss, x, options=EXACT)
    assert marked == [True]


@pytest.mark.slow
def test_lowered_by_inductor(asked, monkeypatch):
    net, x, loss, want = made(3, 1, 1000)
    with torch._inductor.config.patch(force_disable_caches=True):
        hot_step(loss, x, options=EXACT, lower=True)
    for name, got in gradients(net).items():
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["off", "all"])
def test_on_a_gpu(asked, convolved, memory):
    net, x, _, want = made(33, 1, 4001)
    net, x = net.cuda(), x.cuda()

    def loss(x):
        with torch.autocast("cuda", torch.bfloat16):
            return net(x).float().square().mean()

    options = EXACT if memory == "off" else STORED
    with torch._inductor.config.patch(force_disable_caches=True):
        hot_step(loss, x, options=options, lower=True)
    assert convolved
    for name, got in gradients(net).items():
        similar = F.cosine_similarity(got.flatten().cpu(), want[name].flatten(), 0)
        assert similar > 0.99, name
