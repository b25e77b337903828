"""How processes share a model's training: DDP, FSDP2, tensor parallelism, torchtitan's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from step import compile_for, compiling
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Share = Callable[[nn.Module, str, torch.device], Callable[..., Any]]
"""(a model of its own, configuration, device) -> what is called for a forward."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BY_COLUMNS += ("mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.ModuleList | nn.Sequential, str]]:
    """(owner, name) of a transformer's blocks: the longest list of modules that are alike."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    alike = [m for m in lists if len({type(child) for child in m}) == 1]
    longest = max(alike, key=len)
    return ((longest, name) for name, _ in longest.named_children())


def replicated(model: nn.Module, config: str, device: torch.device) -> Callable[..., Any]:
    """DDP, compiled as a whole."""
    on = [device.index] if device.type == "cuda" else None
    return compile_for(config, DistributedDataParallel(model, device_ids=on))


def sharded(
    model: nn.Module,
    config: str,
    device: torch.device,
    checkpointed: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[..., Any]:
    """FSDP2, compiled block by block; checkpointed blocks keep only their inputs."""
    for owner, name in blocks_of(model):
        block: Any = getattr(owner, name)
        if checkpointed:
            block = checkpoint_wrapper(block)
        block = compile_for(config, block)
        setattr(owner, name, fully_shard(block, mp_policy=BF16, mesh=mesh))
    return fully_shard(model, mp_policy=BF16, mesh=mesh)


def split(model: nn.Module, config: str, device: torch.device) -> Callable[..., Any]:
    """Tensor parallelism over all processes, compiled block by block."""
    _split(model, init_device_mesh(device.type, (distributed.get_world_size(),)))
    for owner, name in blocks_of(model):
        setattr(owner, name, compile_for(config, getattr(owner, name)))
    return model


def split_and_sharded(model: nn.Module, config: str, device: torch.device) -> Callable[..., Any]:
    """Both; of two processes, tensor parallelism over one (whose weights are DTensors all the
    same) and FSDP2 over two."""
    processes = distributed.get_world_size()
    tensor = 2 if processes % 4 == 0 else 1
    sizes, names = (processes // tensor, tensor), ("shard", "tensor")
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    _split(model, mesh["tensor"])
    return sharded(model, config, device, mesh=mesh["shard"])


def titans(
    model: nn.Module, config: str, device: torch.device, checkpointed: bool = False
) -> Callable[..., Any]:
    """FSDP2 as torchtitan has it: blocks and loss compiled in place and in one graph each, the
    embedding and the head (which is gathered once) sharded by themselves."""
    for owner, name in blocks_of(model):
        block: Any = getattr(owner, name)
        if checkpointed:
            block = checkpoint_wrapper(block)
            setattr(owner, name, block)
        block.compile(fullgraph=True, **compiling(config, block))
        fully_shard(block, mp_policy=BF16)
    inner: Any = model.model
    fully_shard(inner.embed_tokens, mp_policy=BF16)
    fully_shard([inner.norm, model.lm_head], mp_policy=BF16, reshard_after_forward=False)
    fully_shard(model, mp_policy=BF16)
    loss = torch.compile(_next_tokens, fullgraph=True, **compiling(config, model))

    def forward(labels: Tensor, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=loss(model(**inputs).logits, labels))

    return forward


def parameters_by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """An optimizer's groups: fused AdamW takes no tensors of several meshes at once."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": alike} for alike in groups.values()]


def _split(model: Any, mesh: DeviceMesh) -> None:
    """A language model's layers by columns and by rows; all else is everywhere.

    So is the embedding: torch 2.14 fails in the backward of a compiled block behind a split one.
    """
    plan: dict[str, Any] = {name: ColwiseParallel() for name in BY_COLUMNS}
    plan |= {name: RowwiseParallel() for name in BY_ROWS}
    for owner, name in blocks_of(model):
        parallelize_module(getattr(owner, name), mesh, plan)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def _next_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
