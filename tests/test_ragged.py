"""Batches whose lengths change: as few compiles as stock, and what holds for one length holds."""

import functools
import itertools

import pytest
import torch
from samples_looks import compiled
from samples_storage import ALL
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hot_compile
from hot_compile.backend import hot
from hot_compile.observing import acceptance
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine


class Documents(nn.Module):
    """A block over documents laid end to end, ``ends`` their cumulative lengths; its mean loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(512, 128), nn.RMSNorm(128)
        self.qkv, self.proj = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.head = nn.Linear(128, 512, bias=False)

    def forward(self, ids, ends=None):
        x = self.embed(ids)
        q, k, v = (
            part.unflatten(-1, (4, 32)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mask = None
        if ends is not None:
            document = torch.searchsorted(ends, torch.arange(ids.shape[1]), right=True)
            mask = (document[:, None] == document[None, :]).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=ends is None)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Checkpointed(Documents):
    """Two blocks that are computed again."""

    def block(self, x):
        x = x + self.proj(self.norm(x))
        return x + self.down(F.silu(self.up(self.norm(x))))

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ByPosition(Documents):
    """Documents known by positions that begin anew, as padding-free collators give them."""

    def forward(self, ids, positions):
        x = self.embed(ids) + (positions / 64.0)[..., None].sin()
        document = (positions == 0).cumsum(-1)
        q, k, v = (
            part.unflatten(-1, (4, 32)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.silu(self.up(self.norm(x))))
        labels = torch.where(positions[:, 1:] == 0, -100, ids[:, 1:])
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels.flatten())


class Answers(Documents):
    """Only rows that have labels meet the head, as many as there are."""

    def forward(self, ids, rows):
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x.flatten(0, 1)[rows]), ids.flatten()[rows])


class Weighed(Documents):
    """Each document counts the same: losses are added up by document."""

    def forward(self, ids, document, lengths):
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        each = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="none")
        return (torch.zeros_like(lengths).index_add(0, document, each) / lengths).mean()


LENGTHS = [30, 34], [50, 46], [20, 30, 30], [10, 50, 40, 28], [90]


def ids_of(*shape):
    return torch.randint(0, 512, shape)


def padded():
    """Another length, and another number of rows, every time."""
    return [(ids_of(*size),) for size in ((4, 64), (4, 96), (3, 80), (5, 128), (2, 72))]


def bucketed():
    """One of three lengths."""
    return [(ids_of(4, length),) for length in (64, 128, 64, 256, 128, 64)]


def packed():
    """Padding-free: documents of any number and length in one row, ``cu_seqlens`` beside it."""
    return [(ids_of(1, sum(n)), torch.tensor(n).cumsum(0)) for n in LENGTHS]


def positioned():
    return [(ids_of(1, sum(n)), torch.cat([*map(torch.arange, n)])[None]) for n in LENGTHS]


def answered():
    sizes = (64, 2), (96, 3), (80, 2), (128, 5), (64, 1)
    return [(ids_of(2, n), torch.arange(0, 2 * n, step)) for n, step in sizes]


def weighed():
    return [
        (ids_of(1, sum(n)), torch.arange(len(n)).repeat_interleave(torch.tensor(n)),
         torch.tensor(n, dtype=torch.float32))
        for n in LENGTHS
    ]  # fmt: skip


FORMS = {
    "padded": (Documents, padded),
    "bucketed": (Documents, bucketed),
    "packed": (Documents, packed),
    "by position": (ByPosition, positioned),
    "answers": (Answers, answered),
    "weighed": (Weighed, weighed),
    "checkpointed": (Checkpointed, padded),
}
QUICK = {("padded", True)}


def compiles(backend, model, batches, dynamic):
    """(gradients of the last batch, how many graphs were compiled for all, the compiled step)."""
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend=backend, dynamic=dynamic)
    for batch in batches:
        model.zero_grad()
        call(*batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients, counters["stats"]["unique_graphs"], call


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(FORMS, (None, True))
    ],
)
def test_changing_lengths_compile_no_more_than_stock(name, dynamic, monkeypatch, tmp_path):
    """Looked at, too: what looks find may have a graph compiled once more."""
    monkeypatch.setattr(acceptance, "folder", lambda: tmp_path)
    torch.manual_seed(0)
    make, batches = FORMS[name]
    model, given, reports = make(), batches(), Reports()
    want, stock, _ = compiles("aot_eager", model, given, dynamic)
    options = {**ALL, "keep_head": True, "head_min_bytes": 1024, "accept": "auto"}
    keywords = {"options": options, "recorder": reports, "inner_compile": run_uncompiled}
    backend = functools.partial(hot, **keywords)
    got, ours, step = compiles(backend, model, given, dynamic)
    assert ours <= stock + 1
    assert min(cosine(got[name], want[name]) for name in want) > 0.98
    last = reports.graphs[-1]
    assert len(reports.graphs) <= stock + 1
    if name != "bucketed" or dynamic:
        assert any("s" in size for c in last.crossing for size in c.shape), "sizes are symbols"
    assert [head.chunked for graph in reports.graphs for head in graph.plan.heads] == [True] * len(
        reports.graphs
    )
    assert {"groups6", "rows8"} <= {c.scheme for c in last.crossing}
    found = hot_compile.certificate(step)
    assert found.looks
    assert not found.unseen


@pytest.mark.parametrize("whole", [True, False], ids=["ragged output", "its values"])
def test_nested_tensors_train_and_are_looked_at(whole):
    """torch's own ragged batches (layout jagged): a length is a symbol that has no size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 40))

    def scores(batch):
        found = model(batch)
        return found if whole else found.values()

    step = compiled(scores, lower=True, strict=True)
    for first in (13, 14, 15):
        model.zero_grad()
        parts = [torch.randn(length, 64) for length in (first, 40, 27)]
        found = step(torch.nested.nested_tensor(parts, layout=torch.jagged))
        found = found.values() if whole else found
        F.cross_entropy(found, torch.arange(found.shape[0]) % 40).backward()
    found = hot_compile.certificate(step)
    assert (len(found.looks), found.unseen) == (2, {})
    assert 0 < found.errors.worst < 0.1, "rounded, and compared with exact gradients"
