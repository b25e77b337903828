"""Two processes on this machine (gloo): their gradients together are one process's."""

import copy
import functools

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from forked import in_two_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hot_compile.backend import hot
from hot_compile.record import Reports, run_uncompiled
from hot_compile.testing import cosine

ALWAYS = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def distributed(model, backend):
    """DistributedDataParallel, compiled as a whole."""
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)


def sharded(model, backend, mesh=None):
    """FSDP2, block by block."""
    for block in model:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(model, backend):
    """Tensor parallel, as torchtitan does: weights are DTensors, and blocks sharded besides."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
    return sharded(model, backend, mesh["shard"])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(wrap, rank):
    """Each rank has its half of the batch; in tensor parallel both have the same."""
    torch.manual_seed(0)
    model, reports = nn.Sequential(Block(), Block()), Reports()
    exact, x = copy.deepcopy(model), torch.randn(2, 64, 64)
    mine, batch = (x[0], x[:1]) if wrap is parallel else (x[rank], x)
    exact(batch.flatten(0, 1)).square().mean().backward()
    backend = functools.partial(hot, options=ALWAYS, recorder=reports, inner_compile=run_uncompiled)
    torch._dynamo.reset()
    step = wrap(model, backend)  # has to live: with it goes the one who averages gradients
    step(mine).square().mean().backward()
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert cosine(whole(got.grad), want.grad) > 0.98
    decided = [d for graph in reports.graphs for d in graph.plan]
    assert [d.reason for d in decided] == [""] * 4
    assert any(c.scheme != "exact" for graph in reports.graphs for c in graph.crossing)


BATCHES = torch.linspace(-1, 1, 4 * 2 * 64 * 64).sin().view(4, 2, 64, 64)


def stepped(step, optimizer, batches):
    """The loss of each step."""
    losses = []
    for x in batches:
        loss = step(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def begun(wrap, seed):
    """(model and optimizer, what steps are made by), compiled by hot; ``wrap``: how, or alone."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    backend = functools.partial(hot, options=ALWAYS, inner_compile=run_uncompiled)
    step = wrap(model, backend) if wrap else torch.compile(model, backend=backend)
    owner = step.module if wrap is distributed else model
    return owner, torch.optim.AdamW(owner.parameters(), 1e-2), step


def continued(wrap, rank, folder):
    """What two processes trained and saved goes on in one, under hot as well: same losses."""
    model, optimizer, step = begun(wrap, seed=0)
    stepped(step, optimizer, BATCHES[:2, rank])
    states = get_state_dict(model, optimizer)
    checkpoint.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    went_on = stepped(step, optimizer, BATCHES[2:, rank])
    both = [None, None]
    torch.distributed.all_gather_object(both, went_on)
    return [sum(pair) / 2 for pair in zip(*both, strict=True)]


def alone(folder):
    """The same two steps in one process, with both halves of each batch."""
    model, optimizer, step = begun(None, seed=1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder, no_dist=True)
    given = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **given)
    return stepped(step, optimizer, BATCHES[2:].flatten(1, 2))


def in_turn(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for wrap in (distributed, sharded, parallel):
        check(wrap, rank)
    want = {
        wrap: continued(wrap, rank, f"{folder}/{wrap.__name__}") for wrap in (distributed, sharded)
    }
    torch.distributed.destroy_process_group()
    for wrap, losses in want.items() if rank == 0 else ():
        assert alone(f"{folder}/{wrap.__name__}") == pytest.approx(losses, rel=1e-3)


def test_gradients_are_one_processes_and_checkpoints_go_on_in_one(tmp_path):
    in_two_processes(in_turn, tmp_path)
