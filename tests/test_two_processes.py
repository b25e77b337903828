"""Two processes on this machine (gloo): their gradients together are one process's."""

import copy
import functools

import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from forked import in_two_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
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
    return model


def in_turn(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    trained = {wrap: check(wrap, rank) for wrap in (distributed, sharded, parallel)}
    saved = get_model_state_dict(trained[sharded])
    checkpoint.save(saved, checkpoint_id=f"{folder}/saved")
    alone = get_model_state_dict(nn.Sequential(Block(), Block()))  # another seed, no backend
    checkpoint.load(alone, checkpoint_id=f"{folder}/saved")
    for name, value in alone.items():
        assert torch.equal(value, whole(saved[name]))
    torch.distributed.destroy_process_group()


def test_gradients_are_one_processes_and_checkpoints_are_the_models(tmp_path):
    in_two_processes(in_turn, tmp_path)
