"""Rows picked out of logits: picked before the product, and the logits of all rows are gone."""

import pytest
import torch
import torch.nn.functional as F
from test_head_losses import (
    BATCH,
    FORWARD,
    TOKENS,
    WIDTH,
    Largest,
    Model,
    by_weight,
    compiled,
    distance,
    exact_without_logits,
    given_for,
    inputs,
    outcome,
)
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports
from hot_compile.passes.base.graph import aten

ROWS = torch.tensor([3, 5, 5, 9, 17, -2])
"""One of them twice, one counted from the end."""


def given(rows=BATCH, tokens=TOKENS, count=6, **keywords):
    picked = ROWS.repeat(1 + count // len(ROWS))[:count] % (rows * tokens)
    return given_for(rows, tokens, **keywords) | {"rows": picked}


def labelled(logits, g):
    return F.cross_entropy(logits.flatten(0, 1)[g["rows"]], g["labels"].flatten()[g["rows"]])


def selected(logits, g):
    rows, labels = (t.index_select(0, g["rows"][:2] % len(t)) for t in (logits, g["labels"]))
    return F.cross_entropy(rows.flatten(0, 1).float(), labels.flatten())


def last(logits, g):
    """The last token of each sequence, as in classifying with a language model."""
    places = torch.arange(len(logits)), g["rows"][: len(logits)] % logits.shape[1]
    return F.cross_entropy(logits[places], g["labels"][places])


def positions(logits, g):
    few = g["rows"][:3] % logits.shape[1]
    return F.cross_entropy(logits[:, few].flatten(0, 1), g["labels"][:, few].flatten())


def shifted(logits, g):
    logits, labels = (logits[:, :-1] / 0.7).flatten(0, 1), g["labels"][:, 1:].flatten()
    few = g["rows"] % len(labels)
    return F.cross_entropy(logits[few], labels[few])


def every_other(logits, g):
    return F.cross_entropy(logits[:, ::2].flatten(0, 1), g["labels"][:, ::2].flatten())


def distilled(logits, g):
    mine, theirs = (t.flatten(0, 1)[g["rows"]] for t in (logits, g["teacher"]))
    return F.kl_div(mine.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")


def normalised_first(logits, g):
    """Both log-softmaxes are of all rows."""
    mine, theirs = (t.log_softmax(-1) for t in (logits, g["teacher"]))
    both = F.kl_div(mine, theirs, reduction="none", log_target=True)
    return both.flatten(0, 1)[g["rows"]].sum() / len(g["rows"])


def standardised_first(logits, g):
    logits = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True)
    return labelled(logits * g["weights"][:, :1, None], g)


def in_pairs(logits, g):
    """Two lists of rows with some in common."""
    logits, labels = logits.flatten(0, 1), g["labels"].flatten()
    one, other = (
        logits[rows].log_softmax(-1).gather(-1, labels[rows][:, None]).sum()
        for rows in (g["rows"][:4], g["rows"][2:])
    )
    return -F.logsigmoid(0.1 * (one - other))


def classes(logits, g):
    right = (g["teacher"] > 1).to(logits.dtype).flatten(0, 1)[g["rows"]]
    return F.binary_cross_entropy_with_logits(logits.flatten(0, 1)[g["rows"]], right)


PICKED = {
    "labelled": (labelled, {"bias": True}, [FORWARD]),
    "labelled, LoRA on the head": (labelled, {"adapted": True}, [FORWARD]),
    "sequences": (selected, {}, [FORWARD]),
    "last tokens": (last, {}, [FORWARD]),
    "positions": (positions, {}, [FORWARD]),
    "shifted": (shifted, {}, [FORWARD]),
    "every other": (every_other, {}, [FORWARD]),
    "distilled": (distilled, {}, [FORWARD]),
    "distilled from a head": (distilled, {"teacher": True}, [FORWARD]),
    "normalised first": (normalised_first, {}, [FORWARD]),
    "normalised first, from a head": (normalised_first, {"teacher": True}, [FORWARD]),
    "standardised first": (standardised_first, {}, [FORWARD]),
    "in pairs": (in_pairs, {}, ["logits twice"] * 2),
    "classes": (classes, {}, [FORWARD]),
}
QUICK = ("labelled, LoRA on the head", "shifted", "normalised first", "in pairs")
CASES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PICKED]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_picked_before_the_product(name, monkeypatch):
    """Exact in fp64, and no tensor of all rows times the vocabulary exists."""
    loss, keywords, ways = PICKED[name]
    rtol = 1e-6 if loss is selected else 1e-10  # in fp32
    atol = 1e-13 + rtol / 100
    exact_without_logits(monkeypatch, loss, keywords, ways, given(), 0.1, rtol, atol)


@pytest.mark.parametrize("name", CASES[:1] + CASES[5:11:2])
def test_batch_length_and_the_number_of_rows_may_change(name):
    loss, keywords, _ = PICKED[name]
    model, reports = Model(loss, **keywords).double(), Reports()
    run = compiled(model, reports)
    for rows, tokens, count in ((4, 32, 6), (3, 20, 9), (5, 11, 4)):
        x, g = inputs(rows=rows, tokens=tokens), given(rows, tokens, count)
        for tensor in (x, g["labels"], g["teacher"]):
            torch._dynamo.mark_dynamic(tensor, (0, 1))
        torch._dynamo.mark_dynamic(g["rows"], 0)
        for one, other in zip(outcome(run, model, x, g), outcome(model, model, x, g), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    heads = [head for graph in reports.graphs for head in graph.plan.heads]
    assert all(head.chunked for head in heads), [head.reason for head in heads]
    assert not heads[0].shape[0].isdigit()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["labelled", "normalised first"])
def test_as_inductor_compiles_it(name, dtype):
    """About as far from fp64 as eager is."""
    loss, keywords, _ = PICKED[name]
    model, x, g = Model(loss, **keywords).to(dtype), inputs(dtype), given(dtype=dtype)
    torch._dynamo.reset()
    options = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9, "strict": True}
    run = torch.compile(model, backend=hot, options=options)
    got, eager = outcome(run, model, x, g), outcome(model, model, x, g)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in g.items()}
    exact = model.double()
    truth = outcome(exact, exact, x.double(), wide)
    for one, other, want in zip(got, eager, truth, strict=True):
        assert distance(one, want) < 1.5 * distance(other, want) + 1e-3


WHOLE = {
    "read by another loss": lambda y, g: labelled(y, g) + by_weight(y, g),
    "more rows than there are": lambda y, g: labelled(y, g | {"rows": g["rows"].repeat(99)}),
    "not linear": lambda y, g: labelled(y, g) + y.square().mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_logits_that_are_read_otherwise_stay_whole_and_explain_says_why(name):
    model, x, g, reports = Model(WHOLE[name]).double(), inputs(), given(), Largest()
    got = outcome(compiled(model, reports), model, x, g)
    (head,) = reports.graphs[0].plan.heads
    assert not head.chunked
    assert "picked by an index" in head.reason
    for one, other in zip(got, outcome(model, model, x, g), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


class Seen(Reports):
    """Rows of what indices take out."""

    rows: list[int] = []  # noqa: RUF012

    def graph(self, stage, graph):
        if stage == "forward":
            nodes = getattr(graph, "graph", graph).find_nodes(
                op="call_function", target=aten.index.Tensor
            )
            self.rows = [n.args[0].meta["val"].shape[-1] for n in nodes]


def test_rows_picked_of_a_layers_results_stay_where_they_are():
    layers = nn.Sequential(nn.Linear(WIDTH, 9 * WIDTH), nn.Linear(9 * WIDTH, WIDTH))
    reports, rows = Seen(), ROWS[:4]
    model = compiled(lambda x: layers[1](layers[0](x)[rows].relu()).square().mean(), reports)
    model(torch.randn(20, WIDTH)).backward()
    assert reports.rows == [9 * WIDTH]
    assert not reports.graphs[0].plan.heads


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_mask_has_rows_of_unknown_number_so_its_logits_stay_whole():
    """Dynamo breaks the graph there, unless it is told not to."""

    def loss(logits, g):
        mask = g["labels"] % 3 != 0
        return F.cross_entropy(logits[mask], g["labels"][mask])

    model, x, g, reports = Model(loss).double(), inputs(), given(), Reports()
    got = outcome(compiled(model, reports), model, x, g)
    (head,) = reports.graphs[0].plan.heads
    assert "picked by an index" in head.reason
    for one, other in zip(got, outcome(model, model, x, g), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
