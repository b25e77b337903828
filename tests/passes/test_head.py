"""Heads and their losses in chunks: forms of loss against eager, refusals, structure."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.memory import peak_bytes
from hot_compile.passes.base.graph import aten
from hot_compile.runtime.head import parts, products
from hot_compile.testing import step

VOCABULARY, WIDTH, BATCH, TOKENS = 211, 16, 3, 8
OPTIONS = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9}
FORWARD, BACKWARD = "gradients in the forward", "logits twice"
TARGET = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
IGNORING = TARGET.masked_fill(TARGET % 3 == 0, -100)
WEIGHTS = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(2)) + 0.5


def ce(logits, target=TARGET, **options):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def shifted(logits):
    """As Transformers 4 wrote it."""
    return ce(logits[..., :-1, :].contiguous(), TARGET[..., 1:].contiguous())


def padded(logits):
    """As Transformers 5 does: labels are shifted, logits are not."""
    labels = F.pad(IGNORING, (0, 1), value=-100)[..., 1:].contiguous()
    return ce(logits.float(), labels, reduction="sum") / 7


def z_loss(logits):
    return ce(logits) + 1e-2 * logits.logsumexp(-1).square().mean()


def picked(logits):
    return -logits.float().log_softmax(-1).gather(-1, TARGET[..., None]).mean()


def by_hand(logits):
    return (logits.logsumexp(-1) - logits.gather(-1, TARGET[..., None])[..., 0]).mean()


def focal(logits):
    loss = ce(logits, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def capped(logits):
    return ce(torch.tanh(logits / 3.0) * 3.0)


LOSSES = {
    "mean": (ce, FORWARD),
    "sum": (functools.partial(ce, reduction="sum"), FORWARD),
    "ignore": (functools.partial(ce, target=IGNORING), FORWARD),
    "ignore index": (functools.partial(ce, ignore_index=5), FORWARD),
    "none": (lambda y: ce(y, reduction="none").square().sum(), FORWARD),
    "smoothed": (functools.partial(ce, target=IGNORING, label_smoothing=0.1), FORWARD),
    "weighted": (lambda y: ce(y, IGNORING, weight=WEIGHTS.to(y.dtype)), FORWARD),
    "weighted, smoothed": (
        lambda y: ce(y, IGNORING, weight=WEIGHTS.to(y.dtype), label_smoothing=0.1),
        FORWARD,
    ),
    "shifted": (shifted, FORWARD),
    "padded": (padded, FORWARD),
    "class second": (lambda y: F.cross_entropy(y.transpose(1, 2), TARGET), FORWARD),
    "scaled": (lambda y: ce(y * 0.0625), FORWARD),
    "capped": (capped, FORWARD),
    "z-loss": (z_loss, FORWARD),
    "picked": (picked, FORWARD),
    "by hand": (by_hand, FORWARD),
    "focal": (focal, FORWARD),
    "twice as much": (lambda y: 2 * ce(y) + ce(y).detach(), FORWARD),
}
PARTS = {"mean", "smoothed", "weighted", "ignore index"}
"""Of other losses here, or run by other tests: the quick run leaves them out."""
SLOW = pytest.mark.slow


class Head(nn.Module):
    """A layer and a head, so that gradients have somewhere to go."""

    def __init__(self, loss, bias=False, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(not frozen)
        self.loss = loss

    def forward(self, x):
        return self.loss(self.head(self.body(x).tanh()))


def inputs(dtype=torch.float32, rows=BATCH):
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


def outcome(model, x, backend, **keywords):
    """[loss, gradients...] of one step."""
    model.zero_grad()
    if backend == "eager":
        loss = model(x)
        loss.backward()
    else:
        loss = step(model, x, backend=backend, **keywords)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def chunked(model, x, options=None, **keywords):
    """(outcome, decisions on heads) under the backend."""
    reports = Reports()
    backend = functools.partial(
        hot, options=OPTIONS | (options or {}), recorder=reports, inner_compile=run_uncompiled
    )
    got = outcome(model, x, backend, **keywords)
    return got, [head for graph in reports.graphs for head in graph.plan.heads]


def error(got, want):
    """Largest error of any tensor, relative to its norm."""
    assert len(got) == len(want)
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n in PARTS else ()) for n in LOSSES]
)
def test_every_form_of_loss_is_taken_and_exact(name):
    loss, way = LOSSES[name]
    model, x = Head(loss, bias=True), inputs()
    got, (head,) = chunked(model, x)
    assert (head.name, head.way) == ("head", way), head.reason
    truth = outcome(Head(loss, bias=True).double(), x.double(), "eager")
    assert error(got, truth) < 2e-6


BF16, FP16 = torch.bfloat16, torch.float16
LOW = [("mean", BF16), ("capped", FP16), ("z-loss", BF16), ("smoothed", FP16)]
OTHER = [pytest.param(n, FP16 if d is BF16 else BF16, marks=SLOW) for n, d in LOW]


@pytest.mark.parametrize(("name", "dtype"), [*LOW, *OTHER])
def test_low_precision_is_no_further_from_fp64_than_eager(dtype, name):
    loss, _ = LOSSES[name]
    model, x = Head(loss).to(dtype), inputs(dtype)
    got, (head,) = chunked(model, x)
    assert head.chunked
    truth = outcome(Head(loss).to(dtype).double(), x.double(), "eager")
    eager = outcome(model, x, "eager")
    assert error(got, truth) < 1.5 * error(eager, truth) + 1e-6


def test_fp16_waits_for_the_scale_of_its_loss():
    _, (head,) = chunked(Head(ce).half(), inputs(torch.float16))
    assert head.way == BACKWARD
    assert "underflow" in head.reason


def test_autocast_is_seen_through():
    def autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model, x = Head(padded, bias=True), inputs()
    model.zero_grad()
    reports = Reports()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    loss = step(autocast, x, backend=backend)
    got = [loss, *(p.grad for p in model.parameters())]
    truth = outcome(Head(padded, bias=True).double(), x.double(), "eager")
    assert [h.dtype for g in reports.graphs for h in g.plan.heads] == ["bfloat16"]
    assert error(got, truth) < 2e-2


def test_a_frozen_head_gets_no_gradient():
    got, (head,) = chunked(Head(ce, frozen=True), inputs())
    assert head.chunked
    assert error(got, outcome(Head(ce, frozen=True), inputs(), "eager")) < 1e-6


def test_everything_ignored_is_nan_as_in_eager():
    nothing = functools.partial(ce, target=torch.full_like(TARGET, -100))
    got, (head,) = chunked(Head(nothing), inputs())
    assert head.chunked
    assert got[0].isnan()
    for one, other in zip(got, outcome(Head(nothing), inputs(), "eager"), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_any_rows(rows):
    target = TARGET[:rows, :1]

    def loss(y):
        return ce(y[:, :1], target, reduction="sum")

    got, _ = chunked(Head(loss), inputs(rows=rows))
    want = outcome(Head(loss), inputs(rows=rows), "eager")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_label_out_of_range_is_the_error_it_was():
    bad = TARGET.clone()
    bad[1, 2] = VOCABULARY
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        chunked(Head(functools.partial(ce, target=bad)), inputs())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_every_gradient_it_reached(value):
    x = inputs()
    x[1, 2, 3] = value
    got, _ = chunked(Head(ce), x)
    for one, other in zip(got, outcome(Head(ce), x, "eager"), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


def test_lengths_may_change():
    model = Head(lambda y: ce(y, TARGET[:, : y.shape[1]]))
    reports = Reports()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for tokens in (6, 5):
        model.zero_grad()
        loss = compiled(inputs()[:, :tokens])
        loss.backward()
        got = [loss.detach(), *(p.grad for p in model.parameters())]
        assert error(got, outcome(Head(model.loss), inputs()[:, :tokens], "eager")) < 1e-6
    (head,) = reports.graphs[0].plan.heads
    assert len(reports.graphs) == 1
    assert head.chunked
    assert not head.shape[0].isdigit()


def both_sides(y):
    flat = y.flatten(0, 1)
    return ce(y) + F.cross_entropy(flat.t(), torch.zeros(VOCABULARY, dtype=torch.long))


def test_logits_that_are_read_otherwise_stay_with_a_reason():
    got, (head,) = chunked(Head(both_sides), inputs())
    assert not head.chunked
    assert re.search("reduced over rows|change their order", head.reason)
    assert error(got, outcome(Head(both_sides), inputs(), "eager")) < 1e-6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head": "off"}, "head='off'"),
        ({"recipe": "exact"}, "head='off'"),
        ({"keep_head": False}, "keep_head=False"),
        ({"exclude": "head"}, "in exclude"),
    ],
)
def test_options_leave_a_head_alone(options, why):
    _, (head,) = chunked(Head(ce), inputs(), options)
    assert not head.chunked
    assert why in head.reason


def test_small_logits_are_not_looked_at():
    _, heads = chunked(Head(ce), inputs(), {"head_min_bytes": 2**20})
    assert not heads


@pytest.mark.parametrize(
    ("rows", "dtype", "options", "pays"),
    [
        (BATCH, torch.bfloat16, {}, False),
        (64, torch.bfloat16, {}, True),
        (BATCH, torch.bfloat16, {"override": {"head": "int8"}}, True),
        (BATCH, torch.float32, {}, True),
        (BATCH, None, {}, False),
        (64, None, {}, True),
    ],
)
def test_a_16_bit_heads_sum_in_fp32_takes_no_more_than_its_logits(
    monkeypatch, rows, dtype, options, pays
):
    """8192 rows of Llama-3's head: g_w in fp32, and beside it in bf16, are as large as both are;
    so they are of few rows under autocast (None)."""
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)
    model = Head(lambda y: y.logsumexp(-1).mean()).to(dtype)
    x = inputs(dtype or torch.float32, rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        _, (head,) = chunked(model, x, {"head_min_bytes": 1, **options})
    assert head.chunked == pays
    assert ("add up in fp32" in head.reason) != pays


def test_a_deep_residual_stream_is_read_in_no_time():
    """Every layer's product reaches the loss over twice as many paths as the one before."""

    class Deep(Head):
        def forward(self, x):
            for _ in range(25):
                x = x + self.body(x) * torch.tanh(x)
            return self.loss(self.head(x))

    _, (head,) = chunked(Deep(ce), inputs())
    assert head.chunked


class Returning(Head):
    """The caller gets loss and logits, as from Hugging Face's models."""

    def forward(self, x):
        logits = self.head(self.body(x).tanh())
        return self.loss(logits), logits


@pytest.mark.parametrize("use", ["loss", "both", "logits"])
def test_logits_of_the_caller_have_their_gradient(use):
    def total(result):
        loss, logits = result
        return {"loss": loss, "both": loss + logits.square().mean(), "logits": logits.sin().sum()}[
            use
        ]

    want = outcome(Total(total), inputs(), "eager")
    reports = Reports()
    model = Returning(ce, bias=True)
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    torch._dynamo.reset()
    result = torch.compile(model, backend=backend)(inputs())
    total(result).backward()
    got = [total(result).detach(), *(p.grad for p in model.parameters())]
    (head,) = reports.graphs[0].plan.heads
    assert (head.way, head.returned) == (FORWARD, True)
    assert error(got, want) < 1e-5
    torch.testing.assert_close(result[1], Returning(ce, bias=True)(inputs())[1])


@pytest.mark.parametrize("use", ["loss", "both"])
def test_logits_of_a_head_that_is_a_graph_of_its_own_have_their_gradient(use):
    """As behind a graph break, of FSDP2's blocks for one: the input of the product comes in."""
    model, reports = Returning(ce, bias=True), Reports()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )

    def head(x):
        logits = model.head(x)
        return ce(logits), logits

    def run(function):
        model.zero_grad()
        loss, logits = function(model.body(inputs()).tanh())
        total = loss if use == "loss" else loss + logits.square().mean()
        total.backward()
        return [total.detach(), *(p.grad for p in model.parameters())]

    torch._dynamo.reset()
    got = run(torch.compile(head, backend=backend))
    (found,) = reports.graphs[0].plan.heads
    assert (found.way, found.returned) == (FORWARD, True)
    assert error(got, run(head)) < 1e-5


class Total(Returning):
    """The scalar that the caller makes of loss and logits."""

    def __init__(self, total):
        super().__init__(ce, bias=True)
        self.total = total

    def forward(self, x):
        return self.total(super().forward(x))


def test_neither_logits_nor_their_gradient_are_in_the_graphs():
    graphs = {}

    class Keeping(Reports):
        def graph(self, stage, graph):
            owner = getattr(graph, "graph", graph)
            graphs[stage] = [(n.target, n.meta.get("val")) for n in owner.nodes]

    backend = functools.partial(
        hot, options=OPTIONS, recorder=Keeping(), inner_compile=run_uncompiled
    )
    step(Head(ce), inputs(), backend=backend)
    rows = BATCH * TOKENS
    for stage in ("forward", "backward"):
        sizes = [v.numel() for _, v in graphs[stage] if isinstance(v, torch.Tensor)]
        assert max(sizes) < rows * VOCABULARY
    heads = [t for t, _ in graphs["forward"] if getattr(t, "namespace", "") == "hot"]
    assert heads == [torch.ops.hot.head_both.default]
    assert not [t for t, _ in graphs["backward"] if getattr(t, "namespace", "") == "hot"]


@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    [
        ("mean", torch.bfloat16, "int8"),
        ("smoothed", torch.bfloat16, "chunked"),
        ("mean", torch.float16, "chunked"),
    ],
)
def test_a_weight_that_is_cast_gets_a_gpus_zeros_there(name, dtype, way, monkeypatch):
    """As on a GPU, whose products want a multiple of 16 outputs."""
    monkeypatch.setattr(parts, "missing_outputs", lambda weight: -weight.shape[0] % parts.ALIGN)
    model, x, padded = Head(LOSSES[name][0], bias=True), inputs(), []

    class Keeping(Reports):
        def graph(self, stage, graph):
            owner = getattr(graph, "graph", graph)
            pads = owner.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
            padded.extend(tuple(node.meta["val"].shape) for node in pads)

    def run(recorder):
        keywords = {"recorder": recorder, "inner_compile": run_uncompiled}
        backend = functools.partial(hot, options={**OPTIONS, "head": way}, **keywords)
        with torch.autocast("cpu", dtype):
            return outcome(model, x, backend)

    got = run(Keeping())
    assert {(224, WIDTH), (224,)} <= set(padded)
    monkeypatch.undo()
    torch._dynamo.reset()
    padded.clear()
    want = run(Keeping())
    assert not padded
    assert error(got, want) < 4e-3  # a sum of bf16 products in another order


def test_peak_is_far_below_the_logits():
    rows, vocabulary = 512, 20011
    logits = rows * vocabulary * 4
    model = nn.Linear(8, vocabulary, bias=False)
    x = torch.randn(rows, 8, requires_grad=True)
    target = torch.randint(0, vocabulary, (rows,))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.cross_entropy(model(x), target), backend="hot")
    compiled(x).backward()
    peak = peak_bytes(lambda: compiled(x).backward(), torch.device("cpu"))
    assert peak < 0.5 * logits


def test_a_plan_with_heads_tells_of_them():
    reports = Reports()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    step(Head(ce), inputs(), backend=backend)
    plan = reports.graphs[0].plan
    assert plan.to_json()["heads"][0]["name"] == plan.heads[0].name
    assert plan.heads[0].bytes_left_out == plan.heads[0].logits_bytes


def test_what_lies_behind_a_head_keeps_its_order():
    """Each weight's gradient beside that of its input: Inductor fuses and frees by that order."""
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, VOCABULARY))
    x, target = torch.randn(BATCH * TOKENS, WIDTH), TARGET.flatten()

    def products(**options):
        order = []

        class Seen(Reports):
            def graph(self, stage, graph):
                if stage == "backward":
                    products = filter(is_product, graph.graph.nodes)
                    order.extend(tuple(n.meta["val"].shape) for n in products)

        backend = functools.partial(
            hot, options=OPTIONS | options, recorder=Seen(), inner_compile=run_uncompiled
        )
        torch._dynamo.reset()
        step(lambda x: F.cross_entropy(model(x), target), x, backend=backend)
        return [shape for shape in order if VOCABULARY not in shape]

    assert products() == products(head="off")[-5:]


def is_product(node):
    return node.target is torch.ops.aten.mm.default
