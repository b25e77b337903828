"""Where Inductor lays images out channels last of its own accord, storing follows."""

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from hot_compile.passes.base.graph import aten, walk
from hot_compile.passes.exact import forms as exact_forms
from hot_compile.passes.exact import stems
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD
from hot_compile.passes.storage import layout as layouts
from hot_compile.passes.storage import store as storing
from hot_compile.testing import cosine, hot_step

BATCH, CHANNELS, SIZE = 32, 16, 16
OPTIONS = {"min_gain": 99, "memory": "all", "memory_min_bytes": 1024}  # exact layers


class Net(nn.Module):
    """Two convolutions with their norms, then attention on what they make of the image."""

    def __init__(self, attends=True):
        super().__init__()
        self.attends = attends
        self.conv1 = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.heads = 2

    def forward(self, image):
        x = self.norm1(self.conv1(image)).relu()
        x = self.norm2(self.conv2(x)).relu()
        if not self.attends:
            return x.square().mean()
        tokens = nn.functional.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
        heads = tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).square().mean()


@pytest.fixture
def step(request):
    torch.manual_seed(0)
    net, image = Net(**getattr(request, "param", {})), torch.randn(BATCH, 3, SIZE, SIZE)
    net(image).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return net, image, gradients


def marked(monkeypatch, net, image, **options):
    """The nodes that are taken for channels last."""
    found = []

    def spy(forward, *others):
        forced = layouts.lay_images(forward, *others)
        found.extend(n for n in forward.graph.nodes if layouts._MARK in n.meta)
        return forced

    monkeypatch.setattr("hot_compile.passes.pipeline.lay_images", spy)
    _, (graph,) = hot_step(net, image, options={**OPTIONS, **options})
    return found, graph


def test_images_are_marked_and_what_else_has_four_dimensions_is_not(monkeypatch, step):
    found, graph = marked(monkeypatch, *step[:2])
    assert sum(node.target is aten.convolution.default for node in found) == 2
    for node in found:
        if isinstance(node.meta["val"], tuple):
            continue  # its parts are marked as well
        assert layouts.in_memory(node).is_contiguous(memory_format=torch.channels_last)
        assert layouts.in_memory(node).shape[1] == CHANNELS
    by_name = {c.name: c for c in graph.crossing}
    values = BATCH * CHANNELS * SIZE**2
    assert by_name["convolution"].scheme == "channels8_mask"
    assert by_name["convolution"].bytes == values + 2 * CHANNELS * 4  # scales, and a factor


class Gated(nn.Module):
    """A convolution whose channels a convolution of one position weighs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.gate = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, image):
        x = self.conv(image)
        return (x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()).square().mean()


@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_one_position_does_not_say_how_images_lie(given, monkeypatch):
    """Its strides are those of both layouts, and it is read beside a whole image."""
    monkeypatch.setattr(layouts.GraphLowering, "decide_layout_opt", lambda *_, **__: False)
    net, image = (x.to(memory_format=given) for x in (Gated(), torch.randn(BATCH, 3, SIZE, SIZE)))
    found, _ = marked(monkeypatch, net, image)
    assert bool(found) == (given is torch.channels_last)


class Grouped(nn.Module):
    """Convolutions and a norm of groups, written as Inductor has it on a GPU: in its shape."""

    groups = 4

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.weight = nn.Parameter(torch.rand(CHANNELS, 1, 1))
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, image):
        x = self.conv1(image)
        grouped = x.view(len(x), self.groups, CHANNELS // self.groups, SIZE**2)
        var, mean = torch.var_mean(grouped, (2, 3), correction=0, keepdim=True)
        x = ((grouped - mean) * (var + 1e-5).rsqrt()).view_as(x) * self.weight
        others = self.linear(image)  # of no convolution, and read beside a single number
        others = torch.where(others > 0, others, torch.zeros(())).exp()
        return self.conv2(nn.functional.silu(x)).square().mean() + others.square().mean()


@pytest.mark.parametrize("by", [pytest.param("Inductor", marks=pytest.mark.slow), "the user"])
def test_what_a_norm_of_groups_leaves_is_stored_as_the_image_lies(by, monkeypatch):
    torch.manual_seed(0)
    net, image = Grouped(), torch.randn(BATCH, 3, SIZE, SIZE)
    if by == "the user":
        net, image = (x.to(memory_format=torch.channels_last) for x in (net, image))
        monkeypatch.setattr(layouts.GraphLowering, "decide_layout_opt", lambda *_, **__: False)
    net(image).backward()
    exact = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    found, _ = marked(monkeypatch, net, image)
    whole = [n for n in found if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dim()]
    assert all(n.meta["val"].shape[1] == CHANNELS for n in whole), whole  # none in groups' shape
    assert any(
        n.target is aten.mul.Tensor and n.meta["val"].numel() == image.numel() // 3 * CHANNELS
        for n in whole
    )
    net.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="hot", options=OPTIONS)
    _, code = run_and_get_code(lambda: compiled(image).backward())
    sizes = rf"\({BATCH}, {CHANNELS}, {SIZE}, {SIZE}\)"
    made = re.findall(rf"empty_strided_cpu\({sizes}, \((.*?)\)", str(code))
    assert set(made) == {f"{CHANNELS * SIZE**2}, 1, {CHANNELS * SIZE}, {CHANNELS}"}
    for parameter, want in zip(net.parameters(), exact, strict=True):
        assert cosine(parameter.grad, want) > 0.95


def test_strides_are_kept_where_inductor_keeps_them(monkeypatch, step):
    with torch._inductor.config.patch(layout_optimization=False):
        found, _ = marked(monkeypatch, *step[:2])
    assert found == []


def test_an_inductor_that_does_not_say_changes_nothing(monkeypatch, step):
    def missing(*args, **kwargs):
        raise AttributeError("decide_layout_opt")

    monkeypatch.setattr(layouts.GraphLowering, "decide_layout_opt", missing)
    found, graph = marked(monkeypatch, *step[:2])
    assert found == []
    assert {c.scheme for c in graph.crossing if c.name == "convolution"} == {"channels8_mask"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [{"attends": False}], indirect=True)
def test_nothing_is_laid_out_twice(step):
    """No buffer of an image's size has its channels outermost, in forward or backward."""
    net, image, gradients = step
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="hot", options=OPTIONS)
    _, code = run_and_get_code(lambda: compiled(image).backward())
    image_size = rf"\({BATCH}, {CHANNELS}, {SIZE}, {SIZE}\)"
    made = re.findall(rf"empty_strided_cpu\({image_size}, \((.*?)\)", str(code))
    assert made
    assert set(made) == {f"{CHANNELS * SIZE**2}, 1, {CHANNELS * SIZE}, {CHANNELS}"}
    for parameter, want in zip(net.parameters(), gradients, strict=True):
        assert cosine(parameter.grad, want) > 0.95


class Depthwise(nn.Module):
    """A stem that becomes a dense convolution, and a convolution of each channel behind it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)

    def forward(self, image):
        return self.depthwise(nn.functional.silu(self.norm(self.stem(image)))).square().mean()


def test_a_copy_that_the_backward_makes_again_lies_as_the_forwards(monkeypatch):
    """Of what a convolution's backward reads Inductor keeps the strides: cuDNN would leave its
    kernels for images that lie channels last."""
    read = []

    def spy(forward, backward, *args):
        done = storing.store(forward, backward, *args)
        for node in backward.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
            *_, groups, _ = node.args
            if groups > 1:
                read.append(node.args[1])
        return done

    (form,) = (f for f in exact_forms.EXACT_FORMS if f.replace is stems.replace)
    form = dataclasses.replace(form, pays=lambda reads, tf32: "")
    monkeypatch.setattr(exact_forms, "EXACT_FORMS", (form,))
    monkeypatch.setattr("hot_compile.passes.pipeline.store", spy)
    hot_step(Depthwise(), torch.randn(BATCH, 3, SIZE, SIZE), options=OPTIONS)
    (x,) = read
    assert any(n.target is aten.clone.default for n in walk([x], lambda n: n.all_input_nodes))
    assert x.meta["val"].is_contiguous(memory_format=torch.channels_last)


class Reduced(nn.Module):
    """As SegFormer reduces its keys: normalised tokens, copied as an image, then convolved."""

    def __init__(self):
        super().__init__()
        self.width = nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, 2 * CHANNELS, 2, 2)
        self.last = nn.LayerNorm(2 * CHANNELS)

    def forward(self, tokens):
        x = self.norm(tokens + self.width(tokens).tanh())
        image = x.unflatten(1, (SIZE, SIZE)).permute(0, 3, 1, 2).contiguous()
        return self.last(self.conv(image).flatten(2).transpose(1, 2)).square().mean()


@pytest.mark.slow
def test_a_copy_that_a_convolution_reads_again_lies_as_inductor_lays_it():
    """Its strides are those of the convolution's gradients, and of all that is made of them."""
    torch.manual_seed(0)
    net, tokens = Reduced(), torch.randn(BATCH, SIZE**2, CHANNELS)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="hot", options=OPTIONS)
    _, code = run_and_get_code(lambda: compiled(tokens).backward())
    made = re.findall(
        rf"empty_strided_cpu\(\({BATCH}, {CHANNELS}, {SIZE}, {SIZE}\), (.*?)\)", str(code)
    )
    assert set(made) == {f"({CHANNELS * SIZE**2}, 1, {CHANNELS * SIZE}, {CHANNELS}"}
