"""What tests of the 8-bit forward share: one step under ``hot``."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_compile.testing import hot_step

ALWAYS = {"forward": "int8", "min_gain": 0, "keep_head": False, "memory_min_bytes": 0}
EXACT_BACKWARD = {**ALWAYS, "recipe": "exact", "memory": "off"}
QUANTISE, PRODUCT = "hot.quantize_rows.default", "hot.scaled_int_mm.default"


class Checkpointed(nn.Module):
    """``block``, computed again in the backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def step(model, *inputs, autocast=None, **keywords):
    """(output, gradients, reports) of one training step."""
    found = []

    def loss(*inputs):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            found[:] = [model(*inputs)]
        return found[0].float().square().mean()

    model.zero_grad()
    torch.manual_seed(0)
    _, reports = hot_step(loss, *inputs, **keywords)
    return found[0].detach(), [p.grad.clone() for p in model.parameters()], reports


def calls(reports, target, stage="forward"):
    """How many nodes of the stage's graphs call an operator."""
    return sum(node.target == target for r in reports for node in r.stages[stage].nodes)
