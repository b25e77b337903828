"""Convolutions over patches as products: same values, no convolution left, nothing else touched."""

import dataclasses

import pytest
import torch
from torch import nn

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import forms as exact_forms
from hot_compile.passes.exact import patches
from hot_compile.passes.layers.match_conv import CONVOLUTION_BACKWARD
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact


class Embedding(nn.Module):
    """An image in patches, a norm and a head; with or without channels last."""

    def __init__(self, conv, channels_last=False):
        super().__init__()
        self.conv, self.head = conv, nn.Linear(conv.out_channels, 4)
        self.channels_last = channels_last

    def forward(self, image):
        if self.channels_last:
            image = image.to(memory_format=torch.channels_last)
        tokens = self.conv(image).flatten(2).transpose(1, 2)
        return self.head(tokens).square().mean()


def convolutions(graphs):
    wanted = (aten.convolution.default, CONVOLUTION_BACKWARD)
    return sum(n.target in wanted for graph in graphs for n in graph.nodes)


def gradients(net, image):
    net.zero_grad()
    loss = net(image)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.fixture
def pays(monkeypatch):
    """As if on a GPU, where cuDNN is slow at three channels: (replaced, convolutions left)."""
    seen = []

    def spy(graph, found, chosen):
        done = original(graph, found, chosen)
        seen.append((sum(form.taken for form in done), convolutions([graph])))
        return done

    original = exact_forms.take
    (form,) = (f for f in exact_forms.EXACT_FORMS if f.replace is patches.replace)
    form = dataclasses.replace(form, pays=lambda reads, tf32: "")
    monkeypatch.setattr(exact_forms, "EXACT_FORMS", (form,))
    monkeypatch.setattr("hot_compile.passes.pipeline.take", spy)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("conv", "size", "channels_last"),
    [
        (lambda bias: nn.Conv2d(3, 32, 4, stride=4, bias=bias), (12, 16), False),
        (lambda bias: nn.Conv2d(3, 32, 4, stride=4, bias=bias), (12, 16), True),
        (lambda bias: nn.Conv2d(3, 15, (2, 5), stride=(2, 5), bias=bias), (6, 15), False),
        (lambda bias: nn.Conv1d(1, 8, 7, stride=7, bias=bias), (21,), False),
        (lambda bias: nn.Conv3d(3, 8, 2, stride=2, bias=bias), (4, 6, 2), False),
    ],
)
def test_patches_are_products(pays, conv, size, bias, channels_last):
    torch.manual_seed(0)
    conv = conv(bias)
    net = Embedding(conv, channels_last)
    image = torch.randn(5, conv.in_channels, *size)
    want = gradients(net, image)
    net.zero_grad()
    loss, _ = hot_step(net, image, options=OPTIONS)
    got = [loss.detach(), *(p.grad for p in net.parameters())]
    assert pays == [(1, 0)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=2),
        nn.Conv2d(3, 6, 4, stride=4, groups=3),
        nn.Conv2d(3, 8, 2, stride=2, dilation=2),
        nn.Conv2d(3, 8, 5, stride=5),  # leaves a remainder of 16
        nn.ConvTranspose2d(3, 8, 4, stride=4),
    ],
)
def test_others_stay_convolutions(pays, conv):
    hot_step(Embedding(conv), torch.randn(2, 3, 16, 16), options=OPTIONS)
    assert pays == [(0, 2)]


def test_an_image_that_wants_a_gradient_stays(pays):
    image = torch.randn(2, 3, 16, 16, requires_grad=True)
    hot_step(Embedding(nn.Conv2d(3, 8, 4, stride=4)), image, options=OPTIONS)
    assert pays == [(0, 2)]


def test_recipe_exact_touches_nothing(pays):
    net, image = Embedding(nn.Conv2d(3, 8, 4, stride=4)), torch.randn(2, 3, 16, 16)
    hot_step(net, image, options={"recipe": "exact"})
    assert pays == [(0, 2)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exact_forms": False}, "exact_forms=False"),
        ({"exclude": ["*conv"]}, "in exclude=['*conv']"),
        ({"include": ["*head"]}, "not in include=['*head']"),
        ({"override": {"*conv": "int8"}}, "its backward is rewritten"),
    ],
)
def test_the_user_decides_and_is_told(pays, options, why):
    net, image = Embedding(nn.Conv2d(3, 8, 4, stride=4)), torch.randn(2, 3, 16, 16)
    _, (graph,) = hot_step(net, image, options={**OPTIONS, **options})
    (form,) = graph.plan.exact_forms
    assert (form.layer, form.taken, form.reason) == ("conv", False, why)
    assert pays[0][0] == 0


def test_a_batch_of_any_size(pays):
    net, image = Embedding(nn.Conv2d(3, 8, 4, stride=4)), torch.randn(5, 3, 16, 16)
    want = gradients(net, image)
    net.zero_grad()
    torch._dynamo.mark_dynamic(image, 0)
    loss, _ = hot_step(net, image, options=OPTIONS)
    got = [loss.detach(), *(p.grad for p in net.parameters())]
    assert pays == [(1, 0)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_built_stays_a_convolution(pays, monkeypatch, caplog):
    def fail(*args):
        raise NotImplementedError("no such layout")

    monkeypatch.setattr(patches, "_as_image", fail)
    net = Embedding(nn.Conv2d(3, 8, 4, stride=4))
    _, (graph,) = hot_step(net, torch.randn(2, 3, 16, 16), options=OPTIONS)
    assert pays == [(0, 2)]
    assert "stays as it is" in caplog.text
    assert "no such layout" in graph.plan.exact_forms[0].reason


def test_on_a_cpu_convolutions_stay():
    net, image = Embedding(nn.Conv2d(3, 8, 4, stride=4)), torch.randn(2, 3, 16, 16)
    _, (graph,) = hot_step(net, image, options=OPTIONS)
    (form,) = graph.plan.exact_forms
    assert not form.taken
    assert "runs on cpu" in form.reason


@pytest.mark.parametrize(
    ("dtype", "channels", "tf32", "why"),
    [
        (torch.bfloat16, 3, False, ""),
        (torch.float16, 1, False, ""),
        (torch.bfloat16, 8, False, "fast kernels for 8 channels"),
        (torch.float32, 3, False, "may not use TF32"),
        (torch.float32, 3, True, ""),
        (torch.float64, 3, True, "not measured in torch.float64"),
    ],
)
def test_on_a_gpu_where_cudnn_is_slow_and_a_product_no_less_precise(dtype, channels, tf32, why):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(2, channels, 8, 8, dtype=dtype, device="cuda")
    found = patches.pays(x, tf32)
    assert why in found
    assert bool(why) == bool(found)
