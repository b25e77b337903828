"""Two processes (gloo): what one finds, both do, though the other cannot look."""

import functools
from pathlib import Path

import torch
from forked import in_two_processes
from samples_cancelling import mlp, near_pairs, reward
from torch import nn

from hot_compile.backend import hot
from hot_compile.observing import acceptance
from hot_compile.observing.eager import Eager, TooLarge
from hot_compile.record import Reports, run_uncompiled

OPTIONS = {"min_gain": 0, "accept": "auto"}


class Net(nn.Module):
    """Dynamo compiles no module of torch's own on its own."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(64, 1)

    def forward(self, x):
        return self.layers(x)


def cannot_look(*_):
    raise TooLarge("no memory here")


def train(rank, reports, steps):
    """Digests of the plan after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.parallel.DistributedDataParallel(Net()), near_pairs()
    backend = functools.partial(
        hot, options=OPTIONS, recorder=reports, inner_compile=run_uncompiled
    )
    step, digests = torch.compile(model, backend=backend), []
    for _ in range(steps):
        model.zero_grad()
        reward(step, x + rank).backward()
        digests.append(reports.graphs[-1].digest)
    return digests


def two(rank, folder):
    torch.set_num_threads(1)
    acceptance.folder = lambda: Path(folder) / f"host {rank}"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    if rank == 1:
        Eager.gradients = cannot_look
    digests = train(rank, Reports(), 7)
    seen = [None, None]
    torch.distributed.all_gather_object(seen, digests)
    mine, other = seen
    assert mine[0] == other[0] != mine[-1] == other[-1]
    assert sum(a != b for a, b in zip(mine, other, strict=True)) <= 1  # a step later at most
    again = Reports()
    train(rank, again, 1)  # both know it from the start, by their own hosts' files
    assert [graph.digest for graph in again.graphs] == [mine[-1]]
    torch.distributed.destroy_process_group()


def test_one_decision_a_job_though_one_cannot_look(tmp_path):
    in_two_processes(two, tmp_path)
