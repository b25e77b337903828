"""Heads as trainers and frameworks write them: taken and exact, or left alone with a reason."""

import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile import Monitor
from hot_compile.backend import hot
from hot_compile.errors import OptionWarning
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.passes.option_warnings import warn_once
from hot_compile.runtime.head import products
from hot_compile.testing import cosine, step

VOCABULARY, WIDTH, BATCH, TOKENS = 211, 16, 3, 8
OPTIONS = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9}
FORWARD, BACKWARD = "gradients in the forward", "logits twice"
TARGET = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
IGNORING = TARGET.masked_fill(TARGET % 3 == 0, -100)
MASK = (IGNORING != -100).float()


def ce(logits, target=TARGET, **options):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def picked(logits, target=TARGET):
    """Log-probabilities of the labels, as preference losses write them."""
    return logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]


class Head(nn.Module):
    """A layer and a head; ``loss`` of the head's module and its input."""

    def __init__(self, loss, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.loss = loss

    def forward(self, x):
        return self.loss(self.head(self.body(x).tanh()))


class Biased(Head):
    """What is added to the logits is no bias of the product's, as in Hugging Face's BART."""

    def __init__(self, trained=False, returned=False):
        super().__init__(ce)
        shift = torch.randn(1, VOCABULARY)
        self.shift = nn.Parameter(shift) if trained else nn.Buffer(shift)
        self.returned = returned

    def forward(self, x):
        logits = self.head(self.body(x).tanh())
        logits = logits + self.shift.to(logits.device)
        return (ce(logits), logits) if self.returned else ce(logits)


class Predicting(Head):
    """Two losses by two products with one weight: multi-token prediction."""

    def __init__(self):
        super().__init__(ce)
        self.later = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.body(x).tanh()
        return ce(self.head(x)) + 0.3 * ce(self.head(self.later(x).tanh()), TARGET.roll(-1, 1))


class Contrasting(nn.Module):
    """Retrieval with in-batch negatives: the head's weight is an activation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        x = x.flatten(0, 1)
        return F.cross_entropy(self.query(x) @ self.key(x.flip(1)).t(), torch.arange(len(x)))


class Adapted(Head):
    """LoRA on the head itself."""

    def __init__(self):
        super().__init__(ce)
        self.head.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.body(x).tanh()
        return ce(self.head(x) + 2 * self.up(self.down(x)))


def preference(logits):
    """DPO's: a sequence counts by what its probability is."""
    margin = (picked(logits) * MASK).sum(-1)
    return -F.logsigmoid(0.1 * (margin[0] - margin[1])) + 0.01 * margin[2]


def policy(logits):
    """PPO's and GRPO's: ratios to the old probabilities, clipped."""
    chosen = picked(logits)
    ratio, advantage = (chosen - chosen.detach()).exp(), torch.tensor([1.0, -1.0, 0.5])[:, None]
    return -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * MASK).mean()


def smoothed(logits):
    """As Hugging Face's LabelSmoother has it."""
    chances, labels = -logits.log_softmax(-1), IGNORING.clamp_min(0)[..., None]
    one, all_ = chances.gather(-1, labels), chances.sum(-1, keepdim=True, dtype=torch.float32)
    hidden = (IGNORING == -100)[..., None]
    one, all_ = one.masked_fill(hidden, 0.0), all_.masked_fill(hidden, 0.0)
    count = hidden.numel() - hidden.long().sum()
    return 0.9 * one.sum() / count + 0.1 * all_.sum() / (count * VOCABULARY)


def weighted(logits):
    loss = ce(logits, IGNORING, reduction="none").view(BATCH, TOKENS)
    return ((loss.sum(1) / MASK.sum(1)) * torch.tensor([0.2, 0.3, 0.5])).sum()


def gathered_first(logits):
    chosen = logits.gather(-1, TARGET[..., None])[..., 0]
    return (logits.logsumexp(-1) - chosen).mean()


def by_sequence(logits):
    """TRL's, for want of memory."""
    found = [picked(y, t) for y, t in zip(logits, TARGET, strict=True)]
    return -(torch.stack(found) * MASK).sum() / MASK.sum()


def chosen_and_rejected(logits):
    return -F.logsigmoid(ce(logits[1:], TARGET[1:]) - ce(logits[:1], TARGET[:1]))


def in_parts(logits):
    """A row that no loss reads, parts of parts, and a regulariser of some rows that have labels."""
    first = F.cross_entropy(logits[1:][0][2:], TARGET[1, 2:])
    second = F.cross_entropy(logits[1:][1][:4], TARGET[2, :4])
    return first + second + 1e-2 * logits[1:, 1:3].logsumexp(-1).square().mean()


TAKEN = {
    "stacked": (
        lambda: Head(lambda y: torch.stack([y, 0.5 * y]).log_softmax(-1).square().mean()),
        [FORWARD],
    ),
    "sequence by sequence": (lambda: Head(by_sequence), [FORWARD]),
    "chosen and rejected": (lambda: Head(chosen_and_rejected), [BACKWARD]),
    "parts of parts": (lambda: Head(in_parts), [FORWARD]),
    "last token": (lambda: Head(lambda y: F.cross_entropy(y[:, -1], TARGET[:, -1])), [FORWARD]),
    "preference": (lambda: Head(preference), [BACKWARD]),
    "policy": (lambda: Head(policy), [FORWARD]),
    "smoothed": (lambda: Head(smoothed), [FORWARD]),
    "weighted by sequence": (lambda: Head(weighted), [FORWARD]),
    "last tokens": (lambda: Head(lambda y: ce(y[:, -3:], TARGET[:, -3:])), [FORWARD]),
    "gathered first": (lambda: Head(gathered_first), [FORWARD]),
    "all ignored": (
        lambda: Head(lambda y: ce(y, torch.full_like(TARGET, -100), reduction="sum")),
        [FORWARD],
    ),
    "bias behind": (Biased, [FORWARD]),
    "trained bias behind": (lambda: Biased(trained=True), [FORWARD]),
    "two heads of one weight": (Predicting, [FORWARD, FORWARD]),
    "in-batch negatives": (Contrasting, [FORWARD]),
    "LoRA on the head": (Adapted, [FORWARD]),
    "one column": (lambda: Head(lambda y: ce(y) + y[..., 3].mean()), [FORWARD]),
    "two labels of some rows": (
        lambda: Head(lambda y: ce(y[:, :4], TARGET[:, :4]) + ce(y[:, 3:], TARGET[:, 3:])),
        [FORWARD],
    ),
    "pieces": (
        lambda: Head(
            lambda y: sum(ce(*both) for both in zip(y.chunk(2, 1), TARGET.chunk(2, 1), strict=True))
        ),
        [FORWARD],
    ),
}


def inputs(rows=BATCH, tokens=TOKENS):
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(3))


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def eager(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *gradients(model)]


def backend(reports, **options):
    options = OPTIONS | options
    return functools.partial(hot, options=options, recorder=reports, inner_compile=run_uncompiled)


def chunked(model, x, options=None, **keywords):
    """([loss, gradients...], decisions on heads) of one step."""
    reports = Reports()
    model.zero_grad()
    loss = step(model, x, backend=backend(reports, **(options or {})), **keywords)
    return [loss, *gradients(model)], [h for graph in reports.graphs for h in graph.plan.heads]


def error(got, want):
    """Largest error of any tensor, relative to its norm."""
    pairs = zip(got, want, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("name", TAKEN)
def test_a_form_is_taken_and_exact(name):
    make, ways = TAKEN[name]
    got, heads = chunked(make(), inputs())
    assert [head.way for head in heads] == ways, [head.reason for head in heads]
    assert error(got, eager(make(), inputs())) < 2e-6


REFUSED = {
    "rows in another order": (
        lambda: Head(lambda y: ce(y.transpose(0, 1), TARGET.t().contiguous())),
        "change their order",
    ),
    "normalised over rows": (
        lambda: Head(lambda y: ce(y - y.mean((0, 1), keepdim=True))),
        "reduced over rows",
    ),
    "another layer": (
        lambda: Head(lambda y: ce(y) + y.flatten(0, 1).t().matmul(y.flatten(0, 1)).mean()),
        "read by another product",
    ),
}


QUICK = ("rows in another order", "another layer")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REFUSED]
)
def test_another_form_stays_exact_and_explain_says_why(name):
    make, why = REFUSED[name]
    got, heads = chunked(make(), inputs())
    assert heads
    assert not any(head.chunked for head in heads)
    assert all(re.search(why, head.reason) for head in heads), heads
    assert error(got, eager(make(), inputs())) < 2e-6


CHANGING = {
    "shifted": lambda y, t: ce(y[:, :-1].contiguous(), t[:, 1:].contiguous()),
    "padded": lambda y, t: ce(y.float(), F.pad(t, (0, 1), value=-100)[:, 1:].contiguous()),
    "last": lambda y, t: ce(y[:, -2:], t[:, -2:]),
    "by row": lambda y, t: (picked(y, t).sum(-1) ** 2).mean(),
    "shared": lambda y, t: (
        ce(y, t, reduction="none").view(t.shape) * (1.0 + torch.arange(t.shape[0])[:, None])
    ).mean(),
}
"""Losses of logits and labels whose batch and length may change."""


class Changing(Head):
    """The caller gives the labels and gets loss and logits."""

    def forward(self, x, target):
        logits = self.head(self.body(x).tanh())
        return self.loss(logits, target), logits


@pytest.mark.parametrize(
    "name", ["shifted", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CHANGING][1:])]
)
def test_batch_and_length_may_both_change(name):
    """One graph for all; logits that are returned, and sizes read off them, are no obstacle."""
    model, reports = Changing(CHANGING[name]), Reports()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend(reports))
    for rows, tokens in ((3, 8), (2, 5)):
        given = inputs(rows, tokens), TARGET[:rows, :tokens].contiguous()
        for tensor, dim in itertools.product(given, (0, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        outcomes = []
        for function in (compiled, model):
            model.zero_grad()
            loss, logits = function(*given)
            (loss + 1e-3 * logits.square().mean()).backward()
            outcomes.append([loss.detach(), logits.detach(), *gradients(model)])
        assert error(*outcomes) < 2e-6
    (head,) = [head for graph in reports.graphs for head in graph.plan.heads]
    assert head.chunked, head.reason
    assert head.returned
    assert not head.shape[0].isdigit()


def test_sizes_that_turn_out_to_be_equal_are_one():
    """Labels need not be as many as rows for a gather; once they are, only one symbol is left."""
    model, reports = Changing(lambda y, t: -picked(y[:, 2:5], t[:, 2:5]).mean()), Reports()
    given = inputs(), TARGET.clone()
    for tensor, dim in itertools.product(given, (0, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend(reports))
    outcomes = []
    for function in (compiled, model):
        model.zero_grad()
        loss, _ = function(*given)
        loss.backward()
        outcomes.append([loss.detach(), *gradients(model)])
    assert error(*outcomes) < 2e-6
    assert all(head.chunked for graph in reports.graphs for head in graph.plan.heads)
    fewer = -picked(model(*given)[1][:2, 2:5], TARGET[:2, 2:5]).mean()
    torch.testing.assert_close(compiled(given[0], TARGET[:2].clone())[0], fewer)


def test_lengths_that_dynamo_finds_to_change():
    model, reports = Changing(CHANGING["shifted"]), Reports()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend(reports))
    for tokens in (8, 7, 5, 2):
        outcomes = []
        for function in (compiled, model):
            model.zero_grad()
            loss, _ = function(inputs(tokens=tokens), TARGET[:, :tokens].contiguous())
            loss.backward()
            outcomes.append([loss.detach(), *gradients(model)])
        assert error(*outcomes) < 2e-6
    assert len(reports.graphs) <= 3  # the first, any length, and perhaps two tokens
    assert all(head.chunked for graph in reports.graphs for head in graph.plan.heads)


@pytest.mark.parametrize("use", ["loss", "both", "logits"])
def test_logits_with_a_bias_behind_have_their_gradient(use):
    uses = {"loss": lambda a, b: a, "both": lambda a, b: a + b.square().mean()}

    def run(function, model):
        model.zero_grad()
        total = uses.get(use, lambda a, b: b.sin().sum())(*function(inputs()))
        total.backward()
        return [total.detach(), *gradients(model)]

    model, reports = Biased(trained=True, returned=True), Reports()
    torch._dynamo.reset()
    got = run(torch.compile(model, backend=backend(reports)), model)
    (head,) = reports.graphs[0].plan.heads
    assert (head.way, head.returned) == (FORWARD, True)
    assert error(got, run(model, model)) < 2e-6


def test_compiled_autograd():
    model, x = Head(ce), inputs()
    want = eager(model, x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        got, (head,) = chunked(model, x)
    assert head.chunked
    assert error(got, want) < 2e-6


@pytest.mark.parametrize("scale", [2.0**16, 2.0**40])
def test_a_gradient_scaler_sees_what_overflows(scale):
    def scaled(y):
        return ce(y.float()) * scale

    x = inputs().half()
    got, (head,) = chunked(Head(scaled).half(), x)
    want = eager(Head(scaled).half(), x)
    assert head.way == BACKWARD
    for one, other in zip(got, want, strict=True):
        assert bool(one.isfinite().all()) == bool(other.isfinite().all())


# The products of the logits' gradient on integers


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(products, "CHUNK_BYTES", 7 * 4 * VOCABULARY)
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)


@pytest.mark.parametrize(
    ("options", "loss", "way", "dtype"),
    [
        ({"override": {"hea*": "int8"}}, ce, FORWARD, torch.float32),
        ({"override": {"hea*": "int8"}}, preference, BACKWARD, torch.bfloat16),
        ({"override": {"hea*": "int8"}}, ce, FORWARD, torch.bfloat16),
        ({"head": "int8", "min_gain": 0}, ce, FORWARD, torch.float32),
        ({"head": "int8", "min_gain": 0}, ce, BACKWARD, torch.float16),
    ],
)
def test_the_gradients_products_may_be_on_integers(
    small_chunks, recwarn, options, loss, way, dtype
):
    model, x = Head(loss, bias=True).to(dtype), inputs().to(dtype)
    got, (head,) = chunked(model, x, options)
    exact, _ = chunked(model, x)
    assert (head.way, head.int8) == (way, True), head.reason
    assert f"products are {head.strategy}" in head.reason
    assert [t.dtype for t in got] == [t.dtype for t in exact]
    torch.testing.assert_close(got[0], exact[0])
    assert all(cosine(a, b) > 0.999 for a, b in zip(got, exact, strict=True))
    assert cosine(got[-1], exact[-1]) > 1 - 1e-5  # the bias's is a sum, which stays exact
    assert not torch.equal(got[1], exact[1])
    assert not torch.equal(got[-2], exact[-2])
    assert not [w for w in recwarn if issubclass(w.category, OptionWarning)]


def z_loss(logits):
    return ce(logits) + 1e-2 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize(
    ("options", "loss", "why"),
    [
        ({"min_gain": 1e9}, ce, "not worth it: int8 predicted"),
        ({"override": {"head": "exact"}}, ce, ""),
        ({"min_gain": 0, "include": "no layer"}, z_loss, "multiplied out twice"),
    ],
)
def test_integers_are_asked_for_and_not_taken(options, loss, why):
    got, (head,) = chunked(Head(loss), inputs(), {"head": "int8", **options})
    exact, _ = chunked(Head(loss), inputs())
    assert (head.way, head.int8) == (FORWARD, False)
    assert why in head.reason
    assert all(torch.equal(one, other) for one, other in zip(got, exact, strict=True))


def test_a_head_whose_gradients_are_off_is_exact_from_then_on():
    model, reports, monitor = Head(ce), Reports(), Monitor(every=1, budget=1e-3)
    options = {"override": {"head": "int8"}, "monitor": monitor}
    run = torch.compile(model, backend=backend(reports, **options))
    for _ in range(4):
        run(inputs()).backward()
    assert list(monitor.demoted) == ["head"]
    heads = [head for graph in reports.graphs for head in graph.plan.heads]
    assert [head.chunked for head in heads] == [True] * len(heads)
    assert (heads[0].int8, heads[-1].int8) == (True, False)


@pytest.mark.parametrize("strategy", ["hla8", "gx-only", "luq"])
def test_a_strategy_that_is_none_of_chunks_is_a_layers_and_a_warning_says_so(strategy):
    warn_once.cache_clear()
    with pytest.warns(OptionWarning, match=rf"'head' the strategy '{strategy}'.*'int8'"):
        _, (head,) = chunked(Head(ce), inputs(), {"override": {"head": strategy}})
    assert not head.chunked


def test_a_head_with_a_strategy():
    reports = Reports()
    step(Head(ce), inputs(), backend=backend(reports, override={"head": "int8"}))
    plan = reports.graphs[0].plan
    assert plan.heads[0].strategy == "int8"


def test_a_graph_whose_only_layer_is_its_head_warns_of_nothing(recwarn):
    warn_once.cache_clear()
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    reports = Reports()
    step(lambda x: ce(x @ weight.t()), inputs(), backend=backend(reports))
    assert reports.graphs[0].plan.heads[0].chunked
    assert not [w for w in recwarn if issubclass(w.category, OptionWarning)]
