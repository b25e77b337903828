"""Max pools' gradients gathered by plain operators: the same numbers, whatever the windows."""

import absent_gpu
import pytest
import torch
from forked import in_a_process
from samples_graphs import pools_pay
from torch import nn

from hot_compile.passes import pipeline
from hot_compile.passes.exact import forms as exact_forms
from hot_compile.passes.exact import pools
from hot_compile.testing import hot_step

OPTIONS = {"min_gain": 99, "memory": "off"}  # layers stay exact


@pytest.fixture
def rewritten(monkeypatch):
    """As if on a GPU; how many pools of each graph were rewritten."""
    counts = []
    original = exact_forms.take

    def spy(graph, found, chosen):
        done = original(graph, found, chosen)
        counts.append(sum(form.taken for form in done))
        return done

    pools_pay(monkeypatch)
    monkeypatch.setattr("hot_compile.passes.pipeline.take", spy)
    return counts


class Pooled(nn.Module):
    """A convolution, a pool and a weighted sum, so that every window's gradient differs."""

    def __init__(self, pool, channels_last=False):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3, padding=1), pool
        self.scale, self.channels_last = nn.Parameter(torch.rand(8, 1, 1)), channels_last

    def forward(self, image):
        if self.channels_last:
            image = image.to(memory_format=torch.channels_last)
        y = self.pool(self.conv(image)) * self.scale
        return (y.sin() * torch.linspace(0, 1, y.shape[-1], device=y.device)).sum()


def check(net, image):
    net(image).backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    hot_step(net, image, options=OPTIONS)
    for p, expected in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-5)  # fp32 sums


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("window", "size"),
    [
        ((3, 2, 1), (8, 12)),
        ((2, 2), (6, 10)),
        ((3, 3, 1), (9, 12)),
        ((5, 2, 2), (8, 8)),
        ((4, 2, 1), (8, 8)),
        (((3, 2), (2, 1), (1, 0)), (8, 7)),  # columns: 6 windows over 7 places
        ((3, 1, 1), (5, 7)),
        ((3, 2, 1), (2, 2)),  # one window, which has no neighbour
        ((5, 1, 2), (1, 3)),
    ],
)
def test_gradients_are_those_of_the_pool(rewritten, window, size, channels_last):
    torch.manual_seed(0)
    check(Pooled(nn.MaxPool2d(*window), channels_last), torch.randn(3, 3, *size))
    assert rewritten == [0 if size == (8, 7) else 1]


@pytest.mark.parametrize(("window", "least"), [((2, 2), 0.0), ((3, 2, 1), 1e-11)])
def test_little_is_won_where_no_windows_overlap(monkeypatch, window, least):
    done, own = [], exact_forms.take
    pools_pay(monkeypatch)
    monkeypatch.setattr(pipeline, "take", lambda *args: done.extend(own(*args)) or tuple(done))
    check(Pooled(nn.MaxPool2d(*window)), torch.randn(3, 3, 8, 8))
    (form,) = done
    assert form.taken
    assert least < form.seconds_won / (3 * 8 * 4 * 4) < 1e-12 + 3 * least


def test_ties_go_where_the_forward_sent_them(rewritten):
    """Zeros behind a ReLU: every window has several maxima."""
    torch.manual_seed(0)
    check(Pooled(nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1))), torch.randn(2, 3, 8, 8))
    assert rewritten == [1]


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        (nn.MaxPool2d(3, 2, 1), 9),  # the last stride is cut off
        (nn.MaxPool2d(3, 2, 1, dilation=2), 16),
        (nn.MaxPool2d(2, 2, ceil_mode=True), 7),
        (nn.AvgPool2d(2), 8),
    ],
)
def test_others_stay(rewritten, pool, size):
    torch.manual_seed(0)
    check(Pooled(pool), torch.randn(2, 3, size, size))
    assert rewritten == [0]


def test_a_batch_of_any_size(rewritten):
    torch.manual_seed(0)
    image = torch.randn(5, 3, 8, 8)
    torch._dynamo.mark_dynamic(image, 0)
    check(Pooled(nn.MaxPool2d(3, 2, 1)), image)
    assert rewritten == [1]


def test_a_failure_leaves_the_pool(monkeypatch, caplog):
    def fail(*args):
        raise ValueError("planted")

    pools_pay(monkeypatch)
    monkeypatch.setattr(pools, "_gather", fail)
    torch.manual_seed(0)
    check(Pooled(nn.MaxPool2d(3, 2, 1)), torch.randn(2, 3, 8, 8))
    assert "stays as it is" in caplog.text


@pytest.mark.parametrize("window", [(2, 2), (3, 2, 1)])
def test_choices_cross_as_the_pool_made_them(rewritten, monkeypatch, window):
    """In a view of more dimensions Inductor would lay them otherwise than the image."""
    own, crossing = pipeline.lay_images, []

    def seen(forward, *others):
        (outputs,) = forward.graph.output_node().args
        kept = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node)]
        crossing.extend(value.dim() for value in kept if value.dtype is torch.int8)
        return own(forward, *others)

    monkeypatch.setattr(pipeline, "lay_images", seen)
    check(Pooled(nn.MaxPool2d(*window)), torch.randn(3, 3, 8, 12))
    assert rewritten == [1]
    assert crossing == [4]


class Stem(nn.Module):
    """What reads the pool's gradient: a batch norm's sums, and once more."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32)
        self.pool, self.last = nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 8, 3)

    def forward(self, image):
        return self.last(self.pool(self.norm(self.conv(image)))).square().mean()


def readers(folder):
    """Kernels of a GPU's backward that read which element each window chose."""
    torch.manual_seed(0)
    model, image = Stem(), torch.randn(16, 8, 66, 66)
    codes = absent_gpu.codes_of(lambda: (model, lambda f: f(image)), {"min_gain": 99}, folder)
    kernels = absent_gpu.KERNEL.findall(codes[-1])
    return [name for name, source in kernels if "'*i8'" in source]


def test_the_sum_is_made_in_few_kernels(tmp_path):
    """Of more operations than Inductor puts off each of the four would be written to memory, as
    one still is by torch 2.11."""
    assert len(in_a_process(readers, str(tmp_path))) <= 2
