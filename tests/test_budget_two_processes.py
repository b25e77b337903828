"""Two processes (gloo) whose budgets of the peak are corrected differently still train as one."""

import copy
import datetime
import functools

import pytest
import torch
import torch.nn.functional as F
from forked import in_two_processes
from test_two_processes import distributed, parallel, sharded, whole
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint

from hot_compile import budget
from hot_compile.backend import hot
from hot_compile.budget import Ledger
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine

OPTIONS = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 1024}
MIB = 2**20
STEPS = 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(256), nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Device:
    """Its memory rises by what its process says, once measured; it fits again when corrected."""

    def __init__(self, excess):
        self.excess, self.ledger, self.restarts = excess, None, 0

    def of(self, _device, asked):
        self.ledger = self.ledger or Ledger(asked, self)
        return self.ledger

    def allocated(self):
        return 0

    def restart(self):
        self.restarts += 1

    def peak(self):
        return self.ledger.asked + (self.excess if self.restarts <= 2 else 0)


def train(wrap, rank):
    """Steps whose gradients are the whole batch's; how many graphs each process compiled."""
    torch.manual_seed(0)
    model, reports, device = nn.Sequential(Block(), Block()), Reports(), Device(rank * 6 * MIB)
    exact, x = copy.deepcopy(model), torch.randn(2, 512, 256)
    mine, batch = (x[0], x[:1]) if wrap is parallel else (x[rank], x)
    backend = functools.partial(
        hot, options={**OPTIONS, "peak_budget": "12MiB"}, recorder=reports,
        inner_compile=run_uncompiled, ledger=device.of,
    )  # fmt: skip
    torch._dynamo.reset()
    step = wrap(model, backend)
    exact(batch.flatten(0, 1)).square().mean().backward()
    for _ in range(STEPS):
        step(mine).square().mean().backward()
        for got, want in zip(model.parameters(), exact.parameters(), strict=True):
            assert cosine(whole(got.grad), want.grad) > 0.98
            together(whole(got.grad))
        model.zero_grad()
    counts = [0, 0]
    torch.distributed.all_gather_object(counts, len(reports.graphs))
    return counts


def checkpointed(rank):
    """Collectives inside a graph, to be recomputed; one process has plenty of memory."""
    torch.manual_seed(0)
    first, last, x = nn.Linear(256, 256), nn.Linear(256, 256), torch.randn(2, 1024, 256)[rank]
    group, reports = torch.distributed.group.WORLD, Reports()

    def summed(x):
        return all_reduce(first(x), "sum", group)

    def loss(x):
        y = torch.sigmoid(checkpoint(summed, x, use_reentrant=False))
        return sum(last(part) for part in (y, y.sin(), y.cos(), y.exp())).square().mean()

    loss(x).backward()
    exact = last.weight.grad.clone()
    last.zero_grad()
    asked = ("100MiB", "8MiB")[rank]
    backend = functools.partial(
        hot, options={**OPTIONS, "peak_budget": asked}, recorder=reports,
        inner_compile=run_uncompiled,
    )  # fmt: skip
    torch._dynamo.reset()
    torch.compile(loss, backend=backend)(x).backward()
    assert cosine(last.weight.grad, exact) > 0.98
    (graph,) = reports.graphs
    assert graph.budget.recomputed == 0
    assert bool(graph.budget.stored) == bool(rank)


def together(gradient):
    """Both processes have the very same."""
    other = gradient.clone()
    torch.distributed.broadcast(other, 0)
    assert torch.equal(gradient, other)


def corrected(wrap, rank):
    """The second process alone compiles again."""
    one, other = train(wrap, rank)
    assert other > one > 0


def in_turn(rank, folder, checks):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    budget.cache_dir = lambda: folder
    for check in checks:
        check(rank)
    torch.distributed.destroy_process_group()


DDP, FSDP2, TENSOR = (
    functools.partial(corrected, wrap) for wrap in (distributed, sharded, parallel)
)


@pytest.mark.parametrize(
    "checks", [(DDP, checkpointed), pytest.param((FSDP2, TENSOR), marks=pytest.mark.slow)]
)
def test_processes_may_be_corrected_at_different_steps(tmp_path, checks):
    in_two_processes(in_turn, tmp_path, checks)
