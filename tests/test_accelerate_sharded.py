"""FSDP2 under accelerate's launcher in two processes (gloo): its plugin's own code, and by hand."""

import ast
import re
import subprocess
import sys

import pytest
from own_cache import own_cache
from script_block import BLOCK

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate")

SCRIPT = (
    """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

how, backend = sys.argv[1:]
"""
    + BLOCK
    + """
torch.manual_seed(0)
model, x = nn.Sequential(Block(), Block()), torch.randn(256, 64)
names = list(model.state_dict())
if how == "by hand":
    accelerator = Accelerator(cpu=True)
    for block in model:
        if backend != "no":
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 1e-2))
else:
    regions = how == "regions"
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(
        backend=backend, use_regional_compilation=regions))
    accelerator.state.distributed_type = DistributedType.FSDP  # on a CPU it never says so itself
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    saved = accelerator.get_state_dict(model)  # of the first process
    if accelerator.is_main_process:  # accelerate saves a model compiled as a whole as that
        assert list(saved) == [name if regions else f"_orig_mod.{name}" for name in names]
inner = getattr(model, "_orig_mod", model)
assert all(isinstance(block, FSDPModule) for block in inner)
mine = x.chunk(2)[accelerator.process_index]
losses = []
for _ in range(3):
    loss = model(mine).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()[None]).mean().item())
if accelerator.is_main_process:
    print("losses", losses)
accelerator.end_training()
"""
)


def ran(folder, how, backend):
    """(Losses, what both processes said) of a few steps."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    start = ["-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"]
    ours = ["-m", "hot_compile", "run", "--set", "min_gain=0", "--set", "keep_head=False"]
    done = subprocess.run(
        [sys.executable, *start, "--num_processes", "2", *ours, str(script), how, backend],
        capture_output=True, text=True, check=False, env=own_cache(folder / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(re.search(r"losses (.*)", done.stdout)[1]), done.stderr


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("exact"), "by hand", "no")[0]


@pytest.mark.parametrize("how", ["whole", "regions", "by hand"])
def test_fsdp2_under_accelerate(tmp_path, exact, how):
    losses, told = ran(tmp_path, how, "inductor")
    assert losses == pytest.approx(exact, rel=0.02)
    assert re.search(r"[1-9]\d* of \d+ products rewritten", told), told
