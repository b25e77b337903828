"""What crosses to the backward: how it is stored, why not, and that nothing else changes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from samples_storage import ALL, Block, crossing
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hot_compile.backend import hot
from hot_compile.inspect import run_uncompiled
from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.layers.match import GraphInputs
from hot_compile.passes.storage.crossers import Judge, crossers
from hot_compile.testing import cosine, hot_step


def held(function, *inputs, **options):
    return sum(c.bytes for c in crossing(function, *inputs, **options))


def schemes(kept, module):
    return {c.scheme for c in kept if c.module.startswith(module) and c.bytes_before >= 1024}


LOWERED = pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Run node by node, and behind ``slow`` as Inductor's code, too."""


def stack(depth=2, **kwargs):
    blocks = nn.ModuleList(Block(**kwargs) for _ in range(depth))

    def loss(x, mask=None):
        for block in blocks:
            x = block(x, mask)
        return x.square().mean()

    return blocks, loss


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"causal": True, "rotary": True}, {"kv_heads": 2, "causal": True}, {"dropout": 0.1}],
)
def test_a_transformer_block_keeps_everything_large_compressed(kwargs):
    torch.manual_seed(0)
    _, loss = stack(**kwargs)
    x = torch.randn(4, 48, 128)
    kept = crossing(loss, x)
    large = [c for c in kept if c.bytes_before >= 4 * 48 * 128]  # masks of bytes, too
    names = {c.scheme for c in large}
    exact = [c for c in large if c.scheme == "exact" and not c.packed]
    assert all("a loss stays exact" in c.reason for c in exact), exact
    assert {c.scheme for c in large if c.dtype == "bool"} <= {"bits"}
    assert "groups6" in names
    assert "groups12" in names, "queries and keys"
    assert sum(c.bytes for c in kept) < 0.33 * sum(c.bytes_before for c in kept)


def test_attention_masks_and_softmax_statistics_stay_exact():
    _, loss = stack()
    mask = torch.randn(4, 4, 48, 48)
    kept = crossing(lambda x, m: loss(x, m * 2), torch.randn(4, 48, 128), mask)
    reasons = {c.reason for c in kept if c.scheme == "exact"}
    assert any("logsumexp" in r or "attn" in r for r in reasons), reasons


@pytest.mark.parametrize("norm", ["layer", "rms", "scaled rows"])
def test_what_scales_a_whole_row_of_the_gradient_stays_exact(norm):
    """A norm's 1 / deviation, also divided by its width: one error for all of a row's gradient."""
    first, last, gate = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1)
    norms = {"layer": nn.LayerNorm(256), "rms": nn.RMSNorm(256)}

    def loss(x):
        for _ in range(2):
            y = norms[norm](x) if norm in norms else x * gate(x).sigmoid()
            x = x + last(F.gelu(first(y)))
        return x.square().mean()

    kept = crossing(loss, torch.randn(512, 256, requires_grad=True), memory_min_bytes=0)
    narrow = [c for c in kept if c.shape in (("512", "1"), ("512",))]
    assert narrow
    assert {c.scheme for c in narrow} == {"exact"}, narrow


def test_logits_stay_exact_and_attention_weights_are_stored_as_probabilities():
    """A rounded logit is a factor of e to its error; a rounded probability is off by a percent."""
    head, first = nn.Linear(64, 512), nn.Linear(64, 64)

    def loss(x, y):
        x = first(x)
        logits = head(F.gelu(x))
        weights = (x @ x.transpose(1, 2) * 0.3).softmax(-1)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + head(weights @ x).mean()

    kept = crossing(loss, torch.randn(4, 32, 64), torch.randint(512, (4, 32)))
    logits = [c for c in kept if c.shape == ("128", "512")]
    assert [c.scheme for c in logits] == ["exact"]
    weights = [c for c in kept if c.shape == ("4", "32", "32")]
    assert {c.scheme for c in weights} == {"groups12"}, weights


def test_an_unknown_reader_stays_exact():
    layer = nn.Linear(64, 256)
    last = nn.Linear(256, 8)
    kept = crossing(lambda x: last(layer(x).cumprod(1)).square().mean(), torch.randn(64, 64))
    (read,) = (c for c in kept if c.name == "addmm")
    assert read.scheme == "exact"
    if torch.__version__ >= (2, 14):  # others recompute the product, and say so
        assert "divided by" in read.reason


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(96), nn.RMSNorm(96), nn.LayerNorm(96, elementwise_affine=False)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_norms_along_rows_read_gets_a_scale_a_row(norm, dynamic):
    x = torch.randn(8, 40, 96)
    x[:, 3] *= 1e4  # a row that others must not share a scale with
    before = nn.Linear(96, 96)

    after = nn.Linear(96, 8)

    def loss(x):
        return after(norm(before(x)).sigmoid()).square().mean()

    loss(x).backward()
    want = before.weight.grad.clone()
    before.zero_grad()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    kept = crossing(loss, x, exclude="*")
    stored = [c for c in kept if c.scheme == "rows8"]
    assert any(c.bytes == 8 * 40 * (96 + 2) for c in stored)
    assert cosine(before.weight.grad, want) > 0.999


def test_rows_too_short_or_not_side_by_side_do_not():
    for norm, x in (
        (nn.LayerNorm(16), torch.randn(64, 96, 16)),
        (nn.LayerNorm(96), torch.randn(64, 96, 40).transpose(1, 2)),
    ):
        kept = crossing(lambda x: norm(x.sin()).sigmoid().square().mean(), x)  # noqa: B023
        assert "rows8" not in {c.scheme for c in kept}


def test_relu_masks_are_bits_and_exact():
    """The gradient of a ReLU is zero exactly where its input was not positive."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def loss(x):
        return second(first(x).relu()).square().mean()

    x = torch.eye(64) * 2  # so that first's gradient shows which of its outputs passed
    kept = crossing(loss, x, exclude="*")
    dead = first(x).t() <= 0
    assert (first.weight.grad[dead] == 0).all()
    hidden = next(c for c in kept if c.shape == ("64", "256"))
    assert hidden.scheme == "rows8_mask"  # no norm bounds it
    assert hidden.bytes == 64 * 256 + 64 * 2  # values and mask, scales


def test_batch_norm_and_pooling_cross_compressed():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )  # fmt: skip
    x = torch.randn(8, 3, 16, 16)
    exact = [net(x).square().mean().backward(), [p.grad.clone() for p in net.parameters()]][1]
    net.zero_grad()
    kept = crossing(lambda x: net(x).square().mean(), x)
    assert sum(c.bytes for c in kept) < 0.4 * sum(c.bytes_before for c in kept)
    for want, p in zip(exact, net.parameters(), strict=True):
        if want.norm() > 1e-6:  # a bias before a batch norm has no gradient
            assert cosine(p.grad, want) > 0.95


def normed(batch, layout, **options):
    """How a batch norm's input of 256 positions a sample is stored."""
    net = nn.Sequential(nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Linear(32, 4)
    net.to(memory_format=layout)
    x = torch.randn(batch, 8, 16, 16).contiguous(memory_format=layout)
    with torch._inductor.config.patch(layout_optimization=False):
        kept = crossing(lambda x: head(net(x).mean((2, 3))).square().mean(), x, **options)
    return schemes(kept, "0")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.01}, {"memory_bits": 4}])
def test_what_a_batch_norm_reads_has_a_scale_a_channel(layout, options):
    assert normed(8, layout, **options) == {"channels8_mask"}


class Residual(nn.Module):
    """Two branches and what came before, each ReLU's input shifted by an element's own amount."""

    def __init__(self, channels_last):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(c, 32, 3, padding=1, bias=False) for c in (3, 32, 32)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(3))
        self.shifts = nn.ParameterList(torch.randn(4, 32, 8, 8) for _ in range(3))
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.format)

    def forward(self, x):
        a = (self.norms[0](self.first(x)) + self.shifts[0]).relu()
        b = (self.norms[1](self.second(a)) + self.shifts[1] + a).relu()
        return a, b, (self.norms[2](self.third(b)) + self.shifts[2] + b).relu()


@pytest.mark.parametrize(
    ("channels_last", "expected"),
    [
        (True, {"channels8", "rows8_mask", "bits", "exact"}),
        (False, {"channels8", "groups8_mask", "bits", "exact"}),
    ],
)
def test_masks_in_the_bytes_of_images_are_exact(channels_last, expected):
    """A ReLU's shift has no gradient exactly where its sum was not positive."""
    torch.manual_seed(0)
    net, weight = Residual(channels_last), torch.randn(4, 32, 8, 8)
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=net.format)
    passed = [y > 0 for y in net(x)]
    with torch._inductor.config.patch(layout_optimization=False):
        kept = crossing(lambda x: (net(x)[-1] * weight).sum(), x, exclude="*")
    for shift, alive in zip(net.shifts, passed, strict=True):
        assert torch.equal(shift.grad != 0, alive)
    assert torch.equal(net.shifts[2].grad, weight * passed[2])
    images = [c for c in kept if c.shape == ("4", "32", "8", "8")]
    assert {c.scheme for c in images} == expected
    rides = [c for c in images if "mask" in c.scheme]
    assert all(c.bytes < c.bytes_before / 4 + 600 for c in rides)  # a byte each, and scales


def test_images_that_nothing_sums_by_channel_get_a_scale_a_position():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = nn.Conv2d(64, 8, 1, bias=False)
    nn.Sequential(net, head).to(memory_format=torch.channels_last)
    x = torch.randn(32, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    net.requires_grad_(False)  # so that only what head reads is kept
    with torch._inductor.config.patch(layout_optimization=False):
        kept = crossing(lambda x: head(net(x)).square().mean(), x, exclude="*")
    (image,) = (c for c in kept if c.shape == ("32", "64", "16", "16"))
    assert image.scheme == "rows8"
    assert image.bytes == 32 * 64 * 16 * 16 + 32 * 16 * 16 * 2


def test_a_batch_of_any_size_has_one_scale_a_channel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Linear(32, 4)
    loss = lambda x: head(net(x).mean((2, 3))).square().mean()  # noqa: E731
    net.to(memory_format=torch.channels_last)
    x = torch.randn(6, 8, 16, 16).contiguous(memory_format=torch.channels_last)
    loss(x).backward()
    want = net[0].weight.grad.clone()
    net.zero_grad()
    torch._dynamo.mark_dynamic(x, 0)
    kept = crossing(loss, x)
    assert schemes(kept, "0") == {"channels8_mask"}
    assert cosine(net[0].weight.grad, want) > 0.99


def test_weights_inputs_and_outputs_are_left_alone():
    torch.manual_seed(0)
    layer, outputs = nn.Linear(256, 256), []
    x = torch.randn(64, 256)

    def loss(x):
        y = layer(x)
        outputs.append(y)
        return (y * 2).relu().square().mean()

    kept = crossing(loss, x)
    torch.testing.assert_close(outputs[-1], layer(x), rtol=1e-5, atol=1e-5)
    assert not any(c.name.startswith("primals") for c in kept)


def test_functions_of_weights_alone_stay_exact():
    layer = nn.Linear(256, 256, bias=False)
    gain = nn.Parameter(torch.ones(256, 1))

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gain = layer, gain

        def forward(self, x):
            w = self.layer.weight
            w = self.gain * w / w.norm(dim=1, keepdim=True)
            return F.gelu(x @ w.t()).square().mean()

    kept = crossing(Normed(), torch.randn(128, 256))
    assert all("parameters" in c.reason for c in kept if c.shape == ("256", "256"))


def test_a_checkpointed_region_is_not_fought():
    torch.manual_seed(0)
    blocks, _ = stack(3)

    def loss(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    x = torch.randn(4, 48, 128)
    kept = crossing(loss, x)
    assert sum(c.bytes_before for c in kept) < 6 * x.nbytes
    assert {c.scheme for c in kept if c.shape == ("4", "48", "128")} <= {"rows8", "groups6"}


def test_options_choose_what_is_stored():
    torch.manual_seed(0)
    _, loss = stack(1)
    x = torch.randn(4, 48, 128)
    kept = [
        crossing(loss, x, **options)
        for options in (
            {"memory": "off"},
            {"memory": "paper"},
            {"memory_bits": 8},
            {},
            {"memory_bits": 4},
        )
    ]
    off, paper, eight, six, four = (sum(c.bytes for c in crossers) for crossers in kept)
    assert off >= paper > six
    assert off > eight > six > four
    assert "int4" not in {c.scheme for c in kept[3]}
    assert "groups6" not in {c.scheme for c in kept[2]}


def test_smaller_budgets_never_hold_more():
    torch.manual_seed(0)
    _, loss = stack(1)
    x = torch.randn(4, 48, 128)
    exact, least = held(loss, x, memory="off"), held(loss, x)
    sizes = [held(loss, x, memory_budget=f) for f in (1.0, 0.7, 0.4, 0.0)]
    assert sizes[0] <= exact  # the cut may have moved behind means
    assert sizes[-1] <= least
    assert sizes == sorted(sizes, reverse=True)
    for fraction, size in zip((0.7, 0.4), sizes[1:3], strict=True):
        assert size <= fraction * exact
    assert held(loss, x, memory_budget=int(exact * 0.5)) <= exact * 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@LOWERED
def test_every_dtype_trains(dtype, lower):
    trains(dtype, lower)


def trains(dtype, lower):
    torch.manual_seed(0)
    blocks, loss = stack(1)
    blocks.to(dtype)
    x = torch.randn(4, 48, 128, dtype=dtype)
    loss(x).backward()
    exact = {n: p.grad.clone() for n, p in blocks.named_parameters()}
    blocks.zero_grad()
    hot_step(loss, x, options=ALL, lower=lower)
    for n, p in blocks.named_parameters():
        if exact[n].float().norm() > 1e-4 and "kv.bias" not in n:
            assert cosine(p.grad.float(), exact[n].float()) > 0.9, n


@LOWERED
def test_symbolic_batch_and_length(lower):
    torch.manual_seed(0)
    one_graph_for_every_size(*stack(1), lower)


def test_symbolic_sizes_lowered():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    one_graph_for_every_size(mlp, lambda x: mlp(x).square().mean(), lower=True)


def one_graph_for_every_size(model, loss, lower):
    """The second and third step compile nothing."""
    torch._dynamo.reset()
    counters.clear()
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    backend = functools.partial(hot, options=ALL, **keywords)
    step = torch.compile(loss, backend=backend, dynamic=True)
    for batch, length in ((4, 48), (3, 33), (6, 40)):
        x = torch.randn(batch, length, 128)
        model.zero_grad()
        loss(x).backward()
        exact = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        step(x).backward()
        assert counters["stats"]["unique_graphs"] == 1
        for n, p in model.named_parameters():
            if exact[n].norm() > 1e-6 and "kv.bias" not in n:
                assert cosine(p.grad, exact[n]) > 0.93, n


def test_non_finite_activations_reach_the_gradient():
    _, loss = stack(1)
    layer = nn.Linear(128, 128)
    x = torch.randn(4, 48, 128)
    x[1, 3, 7] = float("inf")
    hot_step(lambda x: loss(layer(x)), x, options=ALL)
    assert not torch.isfinite(layer.weight.grad).all()


@LOWERED
def test_a_failure_while_storing_leaves_everything_exact(monkeypatch, caplog, lower):
    import hot_compile.passes.storage.store as partition

    torch.manual_seed(0)
    blocks, loss = stack()
    x = torch.randn(4, 48, 128)
    loss(x).backward()
    exact = {n: p.grad.clone() for n, p in blocks.named_parameters()}
    blocks.zero_grad()

    unpack, calls = partition.unpack, []

    def breaks(*args):
        calls.append(args)
        if len(calls) > 3:  # both graphs are changed by then
            raise RuntimeError("on purpose")
        return unpack(*args)

    monkeypatch.setattr(partition, "unpack", breaks)
    hot_step(loss, x, options={**ALL, "exclude": "*", "strict": False}, lower=lower)
    assert "on purpose" in caplog.text
    for n, p in blocks.named_parameters():
        torch.testing.assert_close(p.grad, exact[n], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("divisor_first", [True, False])
def test_one_sensitive_reader_is_enough(divisor_first):
    """A product that reads the tensor, too, must not talk its divisor away, in either order."""
    value = FakeTensorMode().from_tensor(torch.empty(4, 64, 64))

    def placeholder(graph, name):
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(graph, op, *args):
        node = graph.call_function(op, args)
        node.meta["val"] = value
        return node

    forward, backward = fx.Graph(), fx.Graph()
    saved = call(forward, aten.mul.Tensor, placeholder(forward, "primals_1"), 2.0)
    forward.output((saved,))
    restored, tangent = (placeholder(backward, n) for n in (saved.name, "tangents_1"))
    readers = [
        lambda: call(backward, aten.div.Tensor, tangent, restored),
        lambda: call(backward, aten.bmm.default, tangent, restored),
    ]
    backward.output(tuple(read() for read in readers[:: 1 if divisor_first else -1]))
    (crosser,) = crossers(forward, backward, 0, Judge(forward, backward, GraphInputs(), smallest=1))
    assert "divided by" in crosser.reason
    assert crosser.schemes == (Scheme.EXACT,)


def test_what_our_operators_compressed_is_not_compressed_again():
    """Nor are the scales of columns, which are floats."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256)
    x = torch.randn(2048, 256)
    kept = crossing(
        lambda x: layer((x * 2).relu()).square().mean(),
        x,
        recompute=False,
        memory_min_bytes=1,
        override={"*": "int8"},
    )
    packed = [c for c in kept if c.packed]
    assert {c.dtype for c in packed} == {"int8", "float32"}
    assert {c.scheme for c in packed} == {"exact"}
    assert all(c.bytes == c.bytes_before and "already" in c.reason for c in packed)
