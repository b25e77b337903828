"""Strided first convolutions over blocks: the same values and gradients, nothing else touched."""

import dataclasses

import pytest
import torch
from torch import nn

from hot_compile.passes.base.graph import aten
from hot_compile.passes.exact import forms as exact_forms
from hot_compile.passes.exact import stems
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact


@pytest.fixture
def replaced(monkeypatch):
    """As if on a GPU: (how many were replaced, the strides of all convolutions), by graph."""
    seen = []
    original = exact_forms.take

    def spy(graph, found, chosen):
        done = original(graph, found, chosen)
        convs = (n for n in graph.nodes if n.target is aten.convolution.default)
        seen.append((sum(form.taken for form in done), [n.args[3] for n in convs]))
        return done

    (form,) = (f for f in exact_forms.EXACT_FORMS if f.replace is stems.replace)
    form = dataclasses.replace(form, pays=lambda reads, tf32: "")
    monkeypatch.setattr(exact_forms, "EXACT_FORMS", (form,))
    monkeypatch.setattr("hot_compile.passes.pipeline.take", spy)
    return seen


class Stem(nn.Module):
    """A convolution of an image and a head on every place of it."""

    def __init__(self, conv, channels_last=False):
        super().__init__()
        self.conv, self.head = conv, nn.Conv2d(conv.out_channels, 4, 1)
        self.channels_last = channels_last

    def forward(self, image):
        if self.channels_last:
            image = image.to(memory_format=torch.channels_last)
        y = self.conv(image).relu()
        return self.head(y).square().mean() + y.flatten(1).cumsum(1).mean()


def check(net, image):
    loss = net(image)
    loss.backward()
    want = [loss.detach(), *(p.grad.clone() for p in net.parameters())]
    net.zero_grad()
    loss, _ = hot_step(net, image, options=OPTIONS)
    got = [loss.detach(), *(p.grad for p in net.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # fp32 sums in another order


@pytest.mark.parametrize(
    ("bias", "channels_last"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "size"),
    [
        (3, 7, 2, 3, (16, 20)),
        (3, 3, 2, 1, (16, 16)),
        (3, 3, 2, 0, (15, 17)),
        (3, 6, 2, 2, (13, 16)),
        (1, 5, 3, 2, (17, 15)),
        (4, (3, 5), 2, (1, 0), (9, 12)),
    ],
)
def test_stems_are_dense_over_blocks(
    replaced, channels, kernel, stride, padding, size, bias, channels_last
):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 6, kernel, stride=stride, padding=padding, bias=bias)
    check(Stem(conv, channels_last), torch.randn(2, channels, *size))
    assert replaced == [(1, [[1, 1], [1, 1]])]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(3, 8, 3, stride=(2, 1)),
        nn.Conv2d(3, 6, 3, stride=2, groups=3),
        nn.Conv2d(3, 8, 3, stride=2, dilation=2),
        nn.ConvTranspose2d(3, 8, 3, stride=2),
    ],
)
def test_others_stay(replaced, conv):
    torch.manual_seed(0)
    check(Stem(conv), torch.randn(2, 3, 12, 12))
    assert replaced[0][0] == 0


def test_an_image_that_wants_a_gradient_stays(replaced):
    image = torch.randn(2, 3, 16, 16, requires_grad=True)
    check(Stem(nn.Conv2d(3, 8, 3, stride=2)), image)
    assert replaced[0][0] == 0


def test_recipe_exact_touches_nothing(replaced):
    net = Stem(nn.Conv2d(3, 8, 3, stride=2))
    hot_step(net, torch.randn(2, 3, 16, 16), options={"recipe": "exact"})
    assert [count for count, _ in replaced] == [0]


def test_a_batch_of_any_size(replaced):
    torch.manual_seed(0)
    image = torch.randn(5, 3, 16, 16)
    torch._dynamo.mark_dynamic(image, 0)
    check(Stem(nn.Conv2d(3, 8, 3, stride=2, padding=1)), image)
    assert replaced[0][0] == 1


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ("cuda", torch.bfloat16, ""),
        ("cuda", torch.float32, "not measured"),
        ("cpu", torch.bfloat16, "runs on cpu"),
    ],
)
def test_only_where_it_was_measured(device, dtype, why):
    """Half precision on CUDA: elsewhere the graph keeps its strides."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(2, 3, 8, 8, dtype=dtype, device=device)
    found = stems.pays(x, True)
    assert why in found
    assert bool(why) == bool(found)
