"""Losses of rows that are no cross entropy: exact in fp64, and no tensor of rows x vocabulary."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.backend import hot
from hot_compile.inspect import Reports, run_uncompiled
from hot_compile.memory import peak_bytes
from hot_compile.runtime.head import bodies, products

VOCABULARY, WIDTH, BATCH, TOKENS = 1511, 8, 4, 32
OPTIONS = {"head_min_bytes": 0, "memory": "off", "min_gain": 1e9, "strict": True}
FORWARD, BACKWARD = "gradients in the forward", "logits twice"


def random(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """A layer, a head and a teacher's head; ``loss`` of the logits and what ``given`` there is."""

    def __init__(self, loss, teacher=False, adapted=False, bias=False, vocabulary=VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocabulary, bias=bias)
        self.loss, self.teacher, self.adapted = loss, None, adapted
        if teacher:
            self.teacher = nn.Linear(WIDTH, vocabulary, bias=bias).requires_grad_(False)
        if adapted:
            self.head.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, False), nn.Linear(4, vocabulary, False)

    def forward(self, x, given):
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        if self.adapted:
            logits = logits + 2 * self.up(self.down(hidden))
        if self.teacher is not None:
            given = given | {"teacher": self.teacher(x)}
        return self.loss(logits, given)


def given_for(rows=BATCH, tokens=TOKENS, vocabulary=VOCABULARY, dtype=torch.float64):
    """Labels, weights, teacher's logits and what else losses want."""
    of = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (rows, tokens), generator=of)
    several = torch.randint(0, vocabulary, (rows, tokens, 3), generator=of)
    return {
        "labels": labels,
        "several": several,
        "mask": (labels % 3 != 0).to(dtype),
        "weights": torch.rand(rows, tokens, generator=of).to(dtype),
        "advantages": random(rows, 1, seed=4).to(dtype),
        "old": random(rows, tokens, seed=5).to(dtype) - 5,
        "hidden": torch.rand(vocabulary, generator=of) < 0.3,
        "teacher": random(rows, tokens, vocabulary).to(dtype),
    }


def mean(per_token, g):
    return (per_token * g["mask"]).sum() / g["mask"].sum()


def picked(logits, g):
    return logits.log_softmax(-1).gather(-1, g["labels"][..., None])[..., 0]


def kl(logits, g, temperature=2.0):
    mine, theirs = (y / temperature for y in (logits, g["teacher"]))
    return mean(F.kl_div(mine.log_softmax(-1), theirs.softmax(-1), reduction="none").sum(-1), g)


def reverse_kl(logits, g):
    mine, theirs = logits.log_softmax(-1), g["teacher"].log_softmax(-1)
    return mean((mine.exp() * (mine - theirs)).sum(-1), g)


def jsd(logits, g, beta=0.3):
    """Generalised Jensen-Shannon divergence."""
    mine, theirs = logits.log_softmax(-1), g["teacher"].log_softmax(-1)
    mixed = torch.logaddexp(mine + math.log(1 - beta), theirs + math.log(beta))
    one = F.kl_div(mixed, theirs, reduction="none", log_target=True)
    other = F.kl_div(mixed, mine, reduction="none", log_target=True)
    return mean((beta * one + (1 - beta) * other).sum(-1), g)


def jsd_by_chances(logits, g):
    mine, theirs = logits.softmax(-1), g["teacher"].softmax(-1)
    mixed = (0.5 * (mine + theirs)).log()
    both = (mine * (mine.log() - mixed) + theirs * (theirs.log() - mixed)).sum(-1)
    return 0.5 * mean(both, g)


def batchmean(logits, g):
    theirs = g["teacher"].log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), theirs, reduction="batchmean", log_target=True)


def soft_labels(logits, g):
    return F.cross_entropy(logits.flatten(0, 1), g["teacher"].softmax(-1).flatten(0, 1))


def distilled(logits, g):
    """Shifted labels and a teacher, together."""
    hard = F.cross_entropy(logits[:, :-1].flatten(0, 1), g["labels"][:, 1:].flatten())
    mine, theirs = logits[:, :-1], g["teacher"][:, :-1]
    soft = F.kl_div(mine.log_softmax(-1), theirs.softmax(-1), reduction="none").sum(-1)
    return 0.3 * hard + 0.7 * (soft * g["mask"][:, 1:]).sum() / g["mask"][:, 1:].sum()


def entropy(logits, g):
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def grpo(logits, g, bonus=0.01, beta=0.04):
    """Group-relative policy optimisation: ratios, clipped, a reference, and entropy."""
    log = logits / 0.9
    chosen = picked(log, g)
    ratio = (chosen - chosen.detach()).exp()
    least = torch.min(ratio * g["advantages"], ratio.clamp(0.8, 1.2) * g["advantages"])
    away = (g["old"] - chosen).exp() - (g["old"] - chosen) - 1
    return mean(-least + beta * away - bonus * entropy(log, g), g)


def dpo(logits, g):
    """Chosen in the first half of a batch, rejected in the second."""
    found = (picked(logits[:, :-1], {"labels": g["labels"][:, 1:]}) * g["mask"][:, 1:]).sum(-1)
    reference = (g["old"] * g["mask"]).sum(-1)
    (chosen, rejected), (first, second) = found.chunk(2), reference.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected - first + second)).mean()


def several_labels(logits, g):
    return -logits.log_softmax(-1).gather(-1, g["several"]).mean()


def any_label(logits, g):
    """A row is right if any of its labels is hit."""
    return (logits.logsumexp(-1) - logits.gather(-1, g["several"]).logsumexp(-1)).mean()


def unlikely(logits, g):
    return -(1 - picked(logits, g).exp()).clamp_min(1e-5).log().mean()


def cut_short(logits, g):
    least = int(0.9 * logits.shape[-1])
    return F.cross_entropy(logits[..., :least].flatten(0, 1), g["labels"].flatten() % least)


def masked(logits, g):
    hidden = g["hidden"].index_fill(0, g["labels"].flatten(), False)
    return -mean(picked(logits.masked_fill(hidden, float("-inf")), g), g)


def compared(logits, g):
    """One-hot labels by comparison."""
    hit = g["labels"][..., None] == torch.arange(logits.shape[-1], device=logits.device)
    return -mean((logits.log_softmax(-1) * hit).sum(-1), g)


def clamped(logits, g):
    return -mean(picked(logits.clamp(-1, 1), g), g)


def regularised(logits, g):
    return -mean(picked(logits, g), g) + 1e-3 * logits.sigmoid().mean()


def by_weight(logits, g):
    per_row = F.cross_entropy(logits.flatten(0, 1), g["labels"].flatten(), reduction="none")
    return (per_row.view(g["labels"].shape) * g["weights"]).sum() / g["weights"].sum()


def metrics(logits, g):
    right = (logits.topk(5, -1).indices == g["labels"][..., None]).any(-1).double().mean()
    top = (logits.argmax(-1) == g["labels"]).double().mean()
    return by_weight(logits, g), right, top, entropy(logits.detach(), g).mean()


def standardised(logits, g):
    """Each row's logits by their own mean and deviation, as in logit-standardised distillation."""
    own = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True)
    return -mean(picked(own, g), g) + 1e-3 * logits.var(-1).mean(), logits.detach().median(-1)[
        0
    ].sum()


def yes_or_no(g):
    """Several classes a row, each right or wrong."""
    return (g["teacher"] > 1).to(g["teacher"].dtype)


def binary(logits, g):
    """Each class and each row with a weight of its own."""
    weights = {"pos_weight": 1 + 3 * g["hidden"].to(logits.dtype), "weight": g["mask"][..., None]}
    return F.binary_cross_entropy_with_logits(logits, yes_or_no(g), **weights)


def focal(logits, g):
    right = yes_or_no(g)
    loss = F.binary_cross_entropy_with_logits(logits, right, reduction="none")
    off = torch.where(right > 0, 1 - logits.sigmoid(), logits.sigmoid())
    return (loss * off.square()).mean()


def sigmoids(logits, g):
    return F.multilabel_soft_margin_loss(logits.flatten(0, 1), yes_or_no(g).flatten(0, 1))


def hinge(logits, g):
    """Every class against the label's."""
    own = logits.gather(-1, g["labels"][..., None])
    return mean((1 + logits - own).clamp_min(0).sum(-1) - 1, g)


def margin(logits, g):
    return F.multi_margin_loss(logits.flatten(0, 1), g["labels"].flatten())


def squares(logits, g):
    return mean((logits - g["teacher"]).square().mean(-1), g)


def huber(logits, g):
    return F.smooth_l1_loss(logits, g["teacher"])


def cosine(logits, g):
    return mean(1 - F.cosine_similarity(logits, g["teacher"], dim=-1), g)


def embedding(logits, g):
    ones = torch.ones_like(g["labels"].flatten(), dtype=logits.dtype)
    return F.cosine_embedding_loss(logits.flatten(0, 1), g["teacher"].flatten(0, 1), ones)


def normalised(logits, g):
    return F.mse_loss(F.normalize(logits, dim=-1), F.normalize(g["teacher"], dim=-1))


LOSSES = {
    "KL to a teacher's logits": (kl, {}, FORWARD),
    "KL to a teacher's head": (kl, {"teacher": True, "bias": True}, FORWARD),
    "reverse KL": (reverse_kl, {}, FORWARD),
    "reverse KL to a head": (reverse_kl, {"teacher": True}, FORWARD),
    "JSD": (jsd, {"teacher": True}, FORWARD),
    "JSD by chances": (jsd_by_chances, {}, FORWARD),
    "batch mean": (batchmean, {"teacher": True}, FORWARD),
    "soft labels": (soft_labels, {}, FORWARD),
    "distilled, shifted": (distilled, {}, FORWARD),
    "distilled from a head, shifted": (distilled, {"teacher": True}, FORWARD),
    "entropy": (lambda y, g: mean(entropy(y, g), g), {}, FORWARD),
    "GRPO": (grpo, {}, FORWARD),
    "DPO": (dpo, {}, BACKWARD),
    "several labels": (several_labels, {}, FORWARD),
    "any label": (any_label, {}, FORWARD),
    "unlikelihood": (unlikely, {}, FORWARD),
    "vocabulary cut short": (cut_short, {}, FORWARD),
    "vocabulary masked": (masked, {}, FORWARD),
    "one-hot": (compared, {}, FORWARD),
    "clamped": (clamped, {}, FORWARD),
    "regularised": (regularised, {}, FORWARD),
    "weights a row": (by_weight, {}, FORWARD),
    "metrics": (metrics, {}, FORWARD),
    "standardised, with a median": (standardised, {}, FORWARD),
    "binary cross entropy": (binary, {"bias": True}, FORWARD),
    "focal": (focal, {}, FORWARD),
    "multi-label soft margin": (sigmoids, {}, FORWARD),
    "hinge": (hinge, {}, FORWARD),
    "multi-margin": (margin, {}, FORWARD),
    "squares to a teacher's logits": (squares, {}, FORWARD),
    "squares to a teacher's head": (squares, {"teacher": True}, FORWARD),
    "Huber": (huber, {"teacher": True}, FORWARD),
    "cosine similarity": (cosine, {"teacher": True}, FORWARD),
    "cosine embedding": (embedding, {}, FORWARD),
    "normalised squares": (normalised, {}, FORWARD),
    "LoRA on the head": (grpo, {"adapted": True}, FORWARD),
    "LoRA on the head, distilled": (kl, {"adapted": True, "teacher": True}, FORWARD),
}


def inputs(dtype=torch.float64, rows=BATCH, tokens=TOKENS):
    return random(rows, tokens, WIDTH, seed=3).to(dtype)


def outcome(function, model, x, given):
    """[results..., gradients...] of one step."""
    model.zero_grad()
    results = function(x, given)
    results = results if isinstance(results, tuple) else (results,)
    results[0].backward()
    return [
        *(r.detach() for r in results),
        *(p.grad for p in model.parameters() if p.requires_grad),
    ]


def compiled(model, reports, **options):
    torch._dynamo.reset()
    own = functools.partial(
        hot, options=OPTIONS | options, recorder=reports, inner_compile=run_uncompiled
    )
    return torch.compile(model, backend=own)


class Largest(Reports):
    """Elements of the largest tensor that each graph computes."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def graph(self, stage, graph):
        if stage in ("forward", "backward"):
            nodes = [n for n in getattr(graph, "graph", graph).nodes if n.op == "call_function"]
            made = [
                n.meta.get("val")
                for n in nodes
                if not {"view", "reshape"} & {n.target.__name__.split(".")[0]}
            ]
            self.largest[stage] = max(v.numel() for v in made if isinstance(v, torch.Tensor))


QUICK = (
    "KL to a teacher's head",
    "JSD",
    "GRPO",
    "DPO",
    "any label",
    "metrics",
    "standardised, with a median",
    "LoRA on the head",
    "binary cross entropy",
    "hinge",
    "cosine similarity",
)


def exact_without_logits(
    monkeypatch, loss, keywords, ways, given, share=1.0, rtol=1e-10, atol=1e-13
):
    """Assert that a head is exact in fp64, goes so, and no tensor takes a share of its logits."""
    monkeypatch.setattr(products, "CHUNK_BYTES", 6 * 8 * VOCABULARY)  # a few rows
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)
    monkeypatch.setattr(products, "_FEW_BYTES", 1)  # however many chunks that makes
    model, x = Model(loss, **keywords).double(), inputs()
    if "teacher" in keywords:
        del given["teacher"]
    reports = Largest()
    run, logits = compiled(model, reports), BATCH * TOKENS * VOCABULARY
    got = outcome(run, model, x, given)
    heads = [head for graph in reports.graphs for head in graph.plan.heads]
    assert [head.way for head in heads] == ways, [head.reason for head in heads]
    assert max(reports.largest.values()) < share * logits
    for one, other in zip(got, outcome(model, model, x, given), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    peak = peak_bytes(lambda: outcome(run, model, x, given), torch.device("cpu"))
    assert peak < 0.6 * 8 * logits
    return reports


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_a_loss_is_exact_and_no_tensor_of_rows_times_vocabulary_exists(name, monkeypatch):
    """Neither in the graphs, nor while the operators run."""
    loss, keywords, way = LOSSES[name]
    reports = exact_without_logits(monkeypatch, loss, keywords, [way], given_for())
    assert set(reports.largest) == {"forward", "backward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KL to a teacher's head", "DPO"])
def test_a_body_may_be_compiled_when_it_first_runs(name, monkeypatch):
    """A large head's: in the forward, and in autograd's thread; the last chunk is shorter."""
    monkeypatch.setattr(bodies, "WORTH", 0)
    monkeypatch.setattr(products, "CHUNK_BYTES", 50 * 8 * VOCABULARY)
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)
    monkeypatch.setattr(products, "_FEW_BYTES", 1)  # however many chunks that makes
    loss, keywords, _ = LOSSES[name]
    model, x, given = Model(loss, **keywords).double(), inputs(), given_for()
    if "teacher" in keywords:
        del given["teacher"]
    got = outcome(compiled(model, Reports()), model, x, given)
    for one, other in zip(got, outcome(model, model, x, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "metrics"])
def test_losses_on_a_gpu(name, dtype):
    """As Inductor compiles it; about as far from fp64 as eager is."""
    loss, keywords, _ = LOSSES[name]
    size = (4, 256, 32000)
    model = Model(loss, vocabulary=size[2], **keywords).cuda().to(dtype)
    x = inputs(dtype, *size[:2]).cuda()
    given = {k: v.cuda() for k, v in given_for(*size, dtype).items()}
    if "teacher" in keywords:
        del given["teacher"]
    torch._dynamo.reset()
    run = torch.compile(model, backend="hot", options={**OPTIONS, "head_min_bytes": 0})
    got, eager = outcome(run, model, x, given), outcome(model, model, x, given)
    exact = copy.deepcopy(model).double()
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    truth = outcome(exact, exact, x.double(), given)
    for one, other, want in zip(got, eager, truth, strict=True):
        assert distance(one, want) < 1.5 * distance(other, want) + 1e-3


def distance(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("width", [4 * WIDTH, 4 * WIDTH + 1])
def test_a_loss_without_a_softmax_needs_results_wider_than_a_layers(width):
    """What a network's last layer predicts is no head, nor what another layer reads."""
    model = Model(squares, vocabulary=width)
    reports = Reports()
    compiled(model, reports)(
        inputs(torch.float32), given_for(vocabulary=width, dtype=torch.float32)
    )
    heads = [head for graph in reports.graphs for head in graph.plan.heads]
    assert [head.name for head in heads] == (["head"] if width > 4 * WIDTH else [])
    layers = nn.Sequential(nn.Linear(WIDTH, 9 * WIDTH), nn.LayerNorm(9 * WIDTH), nn.Tanh())
    body = nn.Sequential(*layers, nn.Linear(9 * WIDTH, WIDTH))
    compiled(lambda x: body(x).square().mean(), reports)(inputs(torch.float32))
    assert not reports.graphs[-1].plan.heads


@pytest.mark.parametrize(("rows", "dtype"), [(40, "bfloat16"), (20, "float32"), (60, "bfloat16")])
@pytest.mark.parametrize("name", ["squares to a teacher's logits", "KL to a teacher's logits"])
def test_a_loss_of_nothing_but_logits_needs_to_save_half(name, rows, dtype, monkeypatch):
    """Their gradient takes their place: of 8 inputs a sum in fp32 takes as much as 16 rows in 16
    bits, and a chunk and its gradient that again. A softmax makes more than the logits."""
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)
    monkeypatch.setattr(products, "_FEW_BYTES", 1)
    kind, reports = getattr(torch, dtype), Reports()
    model, given = Model(LOSSES[name][0]).to(kind), given_for(1, rows, dtype=kind)
    compiled(model, reports)(inputs(kind, 1, rows), given)
    (head,) = [head for graph in reports.graphs for head in graph.plan.heads]
    pays = rows == 60 or "KL" in name
    assert head.chunked == pays, head.reason
    assert ("less than half" in head.reason) != pays


@pytest.mark.parametrize(
    "name",
    [
        "Huber",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("focal", "hinge", "regularised")),
    ],
)
def test_a_mean_of_all_logits_may_be_over_sizes_that_change(name, monkeypatch):
    """The gradient is divided by a size that is no tensor."""
    monkeypatch.setattr(products, "_LEAST_BYTES", 1)
    monkeypatch.setattr(products, "_FEW_BYTES", 1)
    model, reports = Model(LOSSES[name][0]).double(), Reports()
    run = compiled(model, reports)
    for rows, tokens in ((4, 32), (3, 20)):
        x, given = inputs(rows=rows, tokens=tokens), given_for(rows, tokens)
        for tensor in (x, given["labels"], given["teacher"], given["mask"]):
            torch._dynamo.mark_dynamic(tensor, (0, 1))
        got, want = (outcome(f, model, x, given) for f in (run, model))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    (head,) = [head for graph in reports.graphs for head in graph.plan.heads]
    assert head.chunked, head.reason
    assert not head.shape[0].isdigit()
