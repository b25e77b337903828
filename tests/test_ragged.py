"""Batches whose lengths change: as few compiles as stock, and what holds for one length holds."""

import functools

import pytest
import torch
from samples_storage import ALL
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from hot_compile.backend import hot
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


def padded():
    """Buckets: another length, and another number of rows, every time."""
    return [(torch.randint(0, 512, size),) for size in ((4, 64), (4, 96), (3, 80), (5, 128))]


def packed():
    """Padding-free: documents of any number and length in one row."""
    ends = ([30, 64], [50, 96], [20, 50, 80], [10, 60, 100, 128])
    return [(torch.randint(0, 512, (1, e[-1])), torch.tensor(e)) for e in ends]


def compiles(backend, model, batches):
    """(gradients of the last batch, how many graphs were compiled for all)."""
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(model, backend=backend)
    for batch in batches:
        model.zero_grad()
        call(*batch).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("batches", [padded, packed])
def test_changing_lengths_compile_no_more_than_stock(batches):
    torch.manual_seed(0)
    model, given, reports = Documents(), batches(), Reports()
    want, stock = compiles("aot_eager", model, given)
    options = {**ALL, "keep_head": True, "head_min_bytes": 1024}
    keywords = {"options": options, "recorder": reports, "inner_compile": run_uncompiled}
    backend = functools.partial(hot, **keywords)
    got, ours = compiles(backend, model, given)
    assert ours <= stock + 1
    assert min(cosine(got[name], want[name]) for name in want) > 0.98
    last = reports.graphs[-1]
    assert len(reports.graphs) == ours
    assert any("s" in size for c in last.crossing for size in c.shape), "sizes are symbols"
    assert all(head.chunked for graph in reports.graphs for head in graph.plan.heads)
    assert len(last.plan.heads) == 1
    assert {"groups6", "groups12", "rows8"} <= {c.scheme for c in last.crossing}
