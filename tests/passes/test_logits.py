"""Fused attention's logits are looked at while its q and k are stored in 12 bits."""

import dataclasses
import functools
import logging
import math

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hot_compile.backend import _attends, hot
from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.schemes import Scheme
from hot_compile.passes.storage.crossers import Crosser
from hot_compile.passes.storage.logit_errors import (
    LIMIT,
    Attention,
    Logits,
    Operand,
    logit_errors,
    logits_of,
)
from hot_compile.passes.storage.logits import Pair, kept_exact
from hot_compile.passes.storage.pack import pack, unpack
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine, hot_step

WIDTH, HEADS = 128, 4


def stored(x):
    """(parts, what they restore) of x in 12 bits."""
    graph, value = fx.Graph(), FakeTensorMode().from_tensor(x)
    node = graph.placeholder("x")
    node.meta["val"] = value
    emit = Emitter(graph, graph.output(()), node)
    parts = pack(emit, node, Scheme.GROUPS12)
    graph.output_node().args = ((*parts, unpack(emit, parts, value, Scheme.GROUPS12)),)
    *packed, restored = fx.GraphModule({}, graph)(x)
    return packed, restored


def as_on_a_gpu(parts):
    """Whose upper planes are one int16."""
    first, second, rest, scale = parts
    word = first.to(torch.int32) | second.to(torch.int32) << 8
    return [word.to(torch.int16), rest, scale]


@pytest.mark.parametrize("heads_of", [32, 64, 256], ids=lambda n: f"{n} wide")
@pytest.mark.parametrize("layout", [lambda parts: parts, as_on_a_gpu], ids=["bytes", "words"])
@pytest.mark.parametrize("which", ["both", "q", "k"])
def test_an_error_is_what_it_is(heads_of, layout, which):
    """The largest row's; of elements as normal numbers are, a factor of two covers that."""
    torch.manual_seed(0)
    q, k = 7 * torch.randn(2, 5, 17, heads_of), 3 * torch.randn(2, 5, 33, heads_of)
    operands, rounded = [], []
    for x, name in ((q, "q"), (k, "k")):
        packed, restored = stored(x)
        *upper, _, scale = layout(packed)
        packs = which in ("both", name)
        operands.append([*upper, scale] if packs else [x])
        rounded.append(restored if packs else x)
    factor = heads_of**-0.5
    off = factor * (rounded[0] @ rounded[1].mT - q @ k.mT)
    sides = [(Operand(len(given), heads_of),) for given in operands]
    (found,) = logit_errors([t for o in operands for t in o], [Attention(factor, *sides)])
    rows = off.square().mean(-1).sqrt()
    assert 0.8 * rows.max() < found < 4 * rows.mean()


def test_several_attentions_and_parts():
    torch.manual_seed(0)
    wide, q, k = (factor * torch.randn(3, 9, 64) for factor in (50, 1, 1))
    parts = {name: stored(x)[0] for name, x in (("wide", wide), ("q", q), ("k", k))}
    parts = {name: [*upper, scale] for name, (*upper, _, scale) in parts.items()}
    one = Operand(3, 64)
    given = [
        Attention(0.125, (one,), (one,)),
        Attention(0.125, (one, one), (one,)),
        Attention(0.25, (one,), (one,)),
    ]
    tensors = [parts[n] for n in ("q", "k", "q", "wide", "k", "q", "k")]
    first, second, third = logit_errors([t for p in tensors for t in p], given).tolist()
    assert second > 20 * first
    assert third == pytest.approx(2 * first)


def test_what_is_not_finite_says_nothing():
    for odd in (math.nan, math.inf):
        x = torch.randn(4, 64)
        x[1, 3] = odd
        *upper, _, scale = stored(x)[0]
        operands = (Operand(3, 64),)
        logits = Logits()
        logits.due()
        logits.tell(logit_errors([*upper, scale] * 2, [Attention(1.0, operands, operands)]))
        assert not logits.found_wanting()


def test_looks_often_at_first():
    logits = Logits()
    looked = [step for step in range(1, 300) if logits.due()]
    assert looked == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_it_is_told_once():
    logits = Logits()
    for error in (LIMIT / 2, 3 * LIMIT, 4 * LIMIT):
        logits.tell(torch.tensor([0.0, error]))
    assert logits.found_wanting()
    assert logits.error == pytest.approx(3 * LIMIT)
    assert not logits.found_wanting()


class Attends(nn.Module):
    def __init__(self, size=1.0, scaled=False):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scaled = scaled
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH] *= size

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.scaled:
            q, k = F.silu(q), F.silu(k)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


OPTIONS = {"override": {"*": "exact"}, "memory_min_bytes": 0}


def qkv_of(report):
    return [c for c in report.crossing if c.shape[-1] == str(WIDTH // HEADS)]


@pytest.fixture(autouse=True)
def nothing_is_known():
    logits_of.cache_clear()
    yield
    logits_of.cache_clear()


def trained(model, x, steps, lower=False):
    """(reports of what was compiled, cosines of qkv's gradients with exact ones by step)."""
    model(x).square().mean().backward()
    weight = model[0].qkv.weight
    exact, reports, cosines = weight.grad, Reports(), []
    keywords = {} if lower else {"inner_compile": run_uncompiled}
    torch._dynamo.reset()
    backend = functools.partial(hot, options=OPTIONS, recorder=reports, **keywords)
    compiled = torch.compile(model, backend=backend)
    for _ in range(steps):
        model.zero_grad()
        compiled(x).square().mean().backward()
        cosines.append(cosine(weight.grad, exact))
    return reports.graphs, cosines


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_too_large_logits_spoil_one_step_and_say_so(caplog, lower):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attends(60.0)), torch.randn(4, 48, WIDTH)
    with caplog.at_level(logging.WARNING, "hot_compile"):
        (first, second), cosines = trained(model, x, 3, lower)
    assert caplog.text.count("too large to store q and k in 12 bits") == 1
    assert {c.scheme for c in qkv_of(first)} == {"groups12"}
    reasons = [c.reason for c in qkv_of(second) if c.scheme == "exact"]
    assert sum("attention's logits are too large for 12 bits" in reason for reason in reasons) == 2
    assert cosines[0] < 0.9
    assert min(cosines[1:]) > 0.999


def test_logits_that_grow_are_noticed(caplog):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attends()), torch.randn(4, 48, WIDTH)
    backend = functools.partial(hot, options=OPTIONS, inner_compile=run_uncompiled)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with caplog.at_level(logging.WARNING, "hot_compile"):
        for _ in range(3):
            compiled(x)
        assert not caplog.text
        with torch.no_grad():
            model[0].qkv.weight[: 2 * WIDTH] *= 60
        compiled(x)  # the fourth, which is one that looks
    assert "stay exact from the next step on" in caplog.text


def test_another_model_of_the_same_code_is_looked_at_from_its_first_step_on(caplog):
    torch.manual_seed(0)
    x = torch.randn(4, 48, WIDTH)
    for size in (1.0, 60.0):
        assert not caplog.text
        with caplog.at_level(logging.WARNING, "hot_compile"):
            trained(nn.Sequential(Attends(size)), x, 5)
    assert "stay exact from the next step on" in caplog.text


def test_usual_logits_stay_in_12_bits():
    torch.manual_seed(0)
    model = nn.Sequential(Attends(5.0))
    (report,), cosines = trained(model, torch.randn(4, 48, WIDTH), 5)
    assert {c.scheme for c in qkv_of(report)} == {"groups12"}
    assert min(cosines) > 0.995


def test_what_q_and_k_are_computed_of_stays_exact():
    torch.manual_seed(0)
    (report,), _ = trained(nn.Sequential(Attends(scaled=True)), torch.randn(4, 48, WIDTH), 1)
    assert {c.scheme for c in report.crossing if c.shape[-1] == str(3 * WIDTH)} == {"exact"}
    assert not any("watch_logits" in str(n.target) for n in report.stages["forward"].nodes)


def test_so_does_what_nothing_is_measured_of():
    graph = fx.Graph()
    q, k, other = (
        Crosser(node, node, (Scheme.EXACT, Scheme.GROUPS12))
        for node in (graph.placeholder(name) for name in ("q", "k", "other"))
    )
    unknown = Pair((q,), (k,), 1.0, 32, known=False)
    exact = kept_exact([q, k, other], [unknown], None, watched=True)
    assert [c.schemes == (Scheme.EXACT,) for c in exact] == [True, True, False]
    assert "is computed of it" in exact[0].reason
    known = dataclasses.replace(unknown, known=True)
    assert kept_exact([q, k, other], [known], None, watched=True) == [q, k, other]
    exact = kept_exact([q, k, other], [known], None, watched=False)
    assert [len(c.schemes) for c in exact] == [1, 1, 2]


def test_in_cuda_graphs_nobody_could_look():
    torch.manual_seed(0)
    model = nn.Sequential(Attends())
    options = {**OPTIONS, "triton.cudagraphs": True}
    _, (report,) = hot_step(
        lambda x: model(x).square().mean(), torch.randn(4, 48, WIDTH), options=options
    )
    assert sum("cannot be watched" in c.reason for c in qkv_of(report)) == 2
    assert not any("watch_logits" in str(n.target) for n in report.stages["forward"].nodes)


def test_an_attention_in_a_checkpointed_region_is_one_of_the_graphs():
    part = fx.Graph()
    x = part.placeholder("x")
    part.output(part.call_function(F.scaled_dot_product_attention, (x, x, x)))
    whole = fx.Graph()
    whole.output(whole.call_module("region", (whole.placeholder("x"),)))
    inner = fx.GraphModule({}, part)
    assert _attends(inner)
    assert _attends(fx.GraphModule({"region": inner}, whole))
    whole.output_node().args = (next(iter(whole.nodes)),)
    whole.eliminate_dead_code()
    assert not _attends(fx.GraphModule({}, whole))


def test_no_attention_no_operator():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    _, (report,) = hot_step(lambda x: model(x).sum(), torch.randn(32, 64), options=OPTIONS)
    assert not any("watch_logits" in str(n.target) for n in report.stages["forward"].nodes)
