"""Grouped convolutions by the kernels of gradients: same values, where timed to be faster."""

import pytest
import torch
from samples_graphs import forms_pay
from torch import nn

from hot_compile.passes.cost.images import Kind, seconds
from hot_compile.passes.exact import grouped
from hot_compile.testing import hot_step

EXACT = {"min_gain": 99, "memory": "off"}


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a forward as it is and as a gradient, in both layouts, and what was timed."""
    spent, timed = {False: [2.0, 2.0], True: [1.0, 1.0]}, []

    def seconds(kind, device):
        timed.append(kind)
        return spent[kind.rest[3]]

    monkeypatch.setattr(grouped, "seconds", seconds)
    return spent, timed


def step(net, x, taken):
    """What was taken, after values and gradients were compared."""
    x = x.requires_grad_()
    y = net(x)
    y.square().mean().backward()
    want = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad(set_to_none=True)
    found = []

    def loss(x):
        y = net(x)
        found.append(y.detach())
        return y.square().mean()

    hot_step(loss, x, options=EXACT)
    got = [found[-1], x.grad, *(p.grad for p in net.parameters())]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return taken[0]


@pytest.mark.parametrize(
    ("net", "size"),
    [
        (nn.Conv1d(12, 24, 128, padding=64, groups=4), (2, 12, 99)),
        (nn.Conv1d(12, 6, 3, groups=3, bias=False), (1, 12, 17)),
        (nn.Conv1d(8, 8, 5, padding=8, dilation=2, groups=2), (3, 8, 15)),
        (nn.Conv2d(12, 24, 3, padding=1, groups=4), (2, 12, 9, 7)),
        (nn.Conv2d(8, 8, (3, 5), padding=(2, 0), dilation=(1, 2), groups=2), (2, 8, 11, 13)),
        (nn.Conv2d(8, 8, 3, padding="same", groups=2), (1, 8, 1, 1)),
        (nn.Conv2d(8, 8, 3, padding=1, groups=2), (0, 8, 5, 5)),
    ],
)
def test_values_and_gradients_are_the_same(monkeypatch, clock, net, size):
    torch.manual_seed(0)
    taken = forms_pay(monkeypatch, grouped)
    assert step(net, torch.randn(size), taken) == ["grouped convolution by a gradient's kernel"]


@pytest.mark.parametrize(
    "net",
    [
        nn.Conv1d(12, 12, 3),
        nn.Conv1d(12, 12, 3, groups=12),
        nn.Conv1d(12, 12, 3, stride=2, groups=4),
        nn.Conv1d(12, 12, 3, padding=3, groups=4),
        nn.ConvTranspose1d(12, 12, 3, groups=4),
        nn.Conv3d(12, 12, 3, groups=4, padding=1),
    ],
    ids=["one group", "depthwise", "strides", "more padding than taps", "transposed", "volume"],
)
def test_others_stay(monkeypatch, clock, net):
    torch.manual_seed(0)
    size = (2, 12, 9) if net.weight.dim() == 3 else (2, 12, 5, 5, 5)
    assert step(net, torch.randn(size), forms_pay(monkeypatch, grouped)) == []
    assert clock[1] == []


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.9, 1.9], None])
def test_what_is_not_faster_in_both_layouts_stays(monkeypatch, clock, times):
    clock[0][True] = times
    forms_pay(monkeypatch, grouped)
    net, x = nn.Conv1d(12, 24, 3, groups=4), torch.randn(2, 12, 33)
    _, (graph,) = hot_step(lambda x: net(x).square().mean(), x, options=EXACT)
    (form,) = graph.plan.exact_forms
    assert not form.taken
    assert form.reason == "was not timed to be faster on this device"


def test_what_is_timed_is_what_runs(monkeypatch, clock):
    forms_pay(monkeypatch, grouped)
    net, x = nn.Conv1d(12, 24, 128, padding=60, groups=4), torch.randn(2, 12, 99)
    _, (graph,) = hot_step(lambda x: net(x).square().mean(), x, options=EXACT)
    own, other = clock[1][:2]
    assert own.shapes == ((2, 12, 1, 99), (24, 3, 1, 128))
    assert other.shapes == ((2, 12, 1, 99), (12, 6, 1, 128))
    assert own.rest == ((1, 1), (0, 60), (1, 1), False, (0, 0), 4)
    assert other.rest == ((1, 1), (0, 67), (1, 1), True, (0, 0), 4)
    (form,) = graph.plan.exact_forms
    assert form.seconds_won == pytest.approx(1.0)


def test_elsewhere_nothing_is_timed(clock):
    net = nn.Conv1d(12, 24, 3, groups=4)
    _, (graph,) = hot_step(lambda x: net(x).square().mean(), torch.randn(2, 12, 33), options=EXACT)
    (form,) = graph.plan.exact_forms
    assert (form.taken, form.seconds_won) == (False, 0.0)
    assert form.reason == "measured to be faster on CUDA only, not on cpu"
    assert clock[1] == []


def test_without_a_gpu_there_is_no_time():
    kind = Kind(torch.ops.aten.convolution.default, ((1, 4, 1, 9), (4, 2, 1, 3)), torch.half, (), 1)
    assert seconds(kind, torch.device("cpu")) is None
