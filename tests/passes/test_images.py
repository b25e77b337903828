"""Images lie channels last where that was timed to be faster, whatever Inductor's rules say."""

import json
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from samples_graphs import given
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from hot_compile.passes.base.graph import aten
from hot_compile.passes.cost import images, tuned
from hot_compile.passes.storage import layout
from hot_compile.testing import cosine

FIRST, LAST = torch.contiguous_format, torch.channels_last
OPTIONS = {"min_gain": 99, "memory": "all", "memory_min_bytes": 1024}


def graph_of(device="cuda", *, groups=1, transposed=False, size=(4, 32, 16, 16)):
    """Two equal convolutions in a row, and the backward of one."""
    graph, half = fx.Graph(), torch.bfloat16
    channels = size[1]
    weight_size = (channels, channels // groups, *[3] * (len(size) - 2))
    named = {"x": (size, half), "w": (weight_size, half)}
    x, w = given(graph, named, device)
    spread = [[1] * (len(size) - 2)] * 3
    rest = (*spread, transposed, [0] * (len(size) - 2), groups)
    one = graph.call_function(aten.convolution.default, (x, w, None, *rest))
    two = graph.call_function(aten.convolution.default, (one, w, None, *rest))
    one.meta["val"] = two.meta["val"] = x.meta["val"]
    mask = [True, True, True]
    graph.call_function(aten.convolution_backward.default, (two, one, w, [32], *rest, mask))
    return list(graph.nodes)


def wins(nodes, here=True, turned=0):
    """What is asked for where a GPU is here; fake tensors look for one as they are made."""
    with patch("torch.cuda.is_available", lambda: here):
        return images.channels_last_wins(nodes, turned, lambda device: SimpleNamespace(copy=1e12))


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Seconds of a call of each kind by layout, and what was timed."""
    spent, timed = {FIRST: 2.0, LAST: 1.0}, []

    def best(kind, device):
        timed.append(kind)
        if isinstance(spent[LAST], Exception):
            raise spent[LAST]
        return [spent[FIRST], spent[LAST]]

    monkeypatch.setattr(images, "_best", best)
    monkeypatch.setattr(images, "undisturbed", lambda device: patch.dict({}))
    monkeypatch.setattr(tuned, "path_of", lambda device, what: tmp_path / f"gpu{what}.json")
    images._found.cache_clear()
    yield spent, timed
    images._found.cache_clear()


def test_each_kind_is_timed_once_and_counts_as_often_as_it_is_called(clock):
    _, timed = clock
    assert wins(graph_of())
    forward, backward = dict.fromkeys(timed)
    assert len(timed) == 2
    assert forward.target is aten.convolution.default
    products = 4 * 32 * 16 * 16 * 32 * 9
    assert (forward.products, backward.products) == (products, 2 * products)
    assert backward.rest[-1] == (True, True, False)


def test_the_dearest_are_timed(clock, monkeypatch):
    monkeypatch.setattr(images, "_MOST", 1)
    assert wins([*graph_of(size=(1, 32, 4, 4)), *graph_of()])
    assert {kind.shapes[0] for kind in clock[1]} == {(4, 32, 16, 16)}


def test_products_of_a_transposed_convolution_are_those_of_its_small_side(clock):
    wins(graph_of(transposed=True, groups=2))
    assert clock[1][0].products == 4 * 32 * 16 * 16 * 16 * 9


@pytest.mark.parametrize(("last", "faster"), [(1.0, True), (1.85, False), (2.0, False)])
def test_what_is_hardly_faster_is_left(clock, last, faster):
    clock[0][LAST] = last
    assert wins(graph_of()) == faster


@pytest.mark.parametrize(("seconds", "faster"), [(2.0, True), (3.0, False)])
def test_images_that_are_turned_at_the_edges_count(clock, seconds, faster):
    """Three calls win a second each, of which a tenth of all does not count."""
    assert wins(graph_of(), turned=int(seconds * 0.5e12)) == faster


def test_what_is_turned_at_the_edges_are_images_that_come_and_go(monkeypatch):
    """Image, its gradient, the result and its tangent: not weights, nor what lies in between."""
    asked = []
    monkeypatch.setattr(
        layout, "channels_last_wins", lambda nodes, turned, rates: asked.append(turned) or False
    )
    torch.manual_seed(0)
    net = nn.Conv2d(32, 32, 3, padding=1, groups=2)
    image = torch.randn(8, 32, 16, 16, requires_grad=True)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, torch.backends.mkldnn.flags(enabled=False):
        compiled = torch.compile(net, backend="hot", options=OPTIONS)
        compiled(image).square().mean().backward()
        torch._dynamo.reset()
        inside = torch.compile(
            lambda x: net(x.square()).square().mean(), backend="hot", options=OPTIONS
        )
        inside(image.detach()).backward()
    assert asked == [4 * 4 * image.numel(), 4 * image.numel()]


def test_sizes_that_change_are_not_asked_where_they_are_turned(monkeypatch):
    """No guard comes of it: another batch runs by the same code."""
    asked = []
    monkeypatch.setattr(layout, "channels_last_wins", lambda *given: asked.append(given) or False)
    net = nn.Conv2d(32, 32, 3, padding=1, groups=2)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, torch.backends.mkldnn.flags(enabled=False):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="hot", options=OPTIONS, dynamic=True)
        for size in ((8, 32, 16, 24), (6, 32, 12, 20)):
            compiled(torch.randn(size)).square().mean().backward()
    assert len(asked) == 1


def test_a_later_process_heeds_what_was_found(clock):
    spent, timed = clock
    assert wins(graph_of())
    spent[LAST] = 9.0
    images._found.cache_clear()
    assert wins(graph_of())
    assert len(timed) == 2


@pytest.mark.parametrize("content", ["", "[1]", "{", '["a", "b"]'])
def test_a_file_that_is_none_of_ours_counts_as_not_there(clock, tmp_path, content):
    wins(graph_of())
    (path,) = tmp_path.glob("*-images-*.json")
    path.write_text(content)
    images._found.cache_clear()
    assert wins(graph_of())
    assert len(clock[1]) == 4


def test_what_cannot_be_timed_stays(clock):
    spent, _ = clock
    spent[LAST] = RuntimeError("out of memory")
    assert not wins(graph_of())
    spent[LAST] = 1.0
    images._found.cache_clear()  # the next process finds memory
    assert wins(graph_of())


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"size": (4, 32, 16)}])
def test_others_are_not_timed(clock, given):
    assert not wins(graph_of(**given))
    assert not wins([])
    assert clock[1] == []


def test_a_gpu_that_is_not_here_is_not_timed(clock):
    assert not wins(graph_of(), here=False)
    assert clock[1] == []


def test_a_size_that_changes_is_not_timed(clock):
    nodes = graph_of()
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    batch = torch.empty(4, 32, 16, 16)
    torch._dynamo.mark_dynamic(batch, 0)
    nodes[0].meta["val"] = mode.from_tensor(batch)
    assert not wins(nodes)
    assert clock[1] == []


class Grouped(nn.Module):
    """Convolutions that Inductor leaves as they lie."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(32, 32, 3, padding=1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.two = nn.Conv2d(32, 32, 3, padding=1, bias=False)

    def forward(self, image):
        return self.two(self.norm(self.one(image)).relu()).square().mean()


@pytest.mark.parametrize("faster", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inductor_lays_images_so_and_packing_follows(monkeypatch, faster):
    monkeypatch.setattr(layout, "channels_last_wins", lambda *_: faster)
    torch.manual_seed(0)
    net, image = Grouped(), torch.randn(8, 32, 16, 16)
    net(image).backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch._dynamo.reset()
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, torch.backends.mkldnn.flags(enabled=False):  # with it, Inductor always does
        compiled = torch.compile(net, backend="hot", options=OPTIONS)
        _, code = run_and_get_code(lambda: compiled(image).backward())
    made = re.findall(r"empty_strided_cpu\(\(8, 32, 16, 16\), \((.*?)\)", code[0])
    assert set(made) == {"8192, 1, 512, 32" if faster else "8192, 256, 16, 1"}
    for parameter, want in zip(net.parameters(), wanted, strict=True):
        assert cosine(parameter.grad, want) > 0.95


@pytest.mark.gpu
def test_convolutions_are_timed_and_train_so_on_a_gpu(tmp_path, monkeypatch):
    """Groups of many channels in half precision; whether they win is the device's to say."""
    monkeypatch.setattr(tuned, "rates_folder", lambda: tmp_path)
    monkeypatch.setattr(images, "GAIN", 1000.0)  # they win however long they take
    images._found.cache_clear()
    torch.manual_seed(0)
    net, image = Grouped().cuda(), torch.randn(64, 32, 17, 15, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        net(image).backward()
        wanted = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="hot", options=OPTIONS | {"accept": "off"})
        with torch._inductor.config.patch(force_disable_caches=True):
            _, code = run_and_get_code(lambda: compiled(image).backward())
    images._found.cache_clear()
    timed = [json.loads(path.read_text()) for path in tmp_path.glob("*-images-*.json")]
    assert timed
    assert all(0 < seconds < 1 for times in timed for seconds in times)
    made = re.findall(r"empty_strided_cuda\(\(64, 32, 17, 15\), \((.*?)\)", str(code))
    assert set(made) == {"8160, 1, 480, 32"}
    for parameter, want in zip(net.parameters(), wanted, strict=True):
        assert cosine(parameter.grad, want) > 0.95
