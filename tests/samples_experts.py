"""Experts that a router picks, as Transformers, torchtitan and others write them."""

import torch
import torch.nn.functional as F
from torch import nn


class Routed(nn.Module):
    """Each row's best ``top`` of the experts, weighted.

    ``masked``: rows may belong to no expert, as where these are on several devices; ``wide``: the
    weights are in fp32; ``inner``: what each expert makes of a row is that wide.
    """

    def __init__(self, width=64, inner=48, experts=8, top=2, masked=False, wide=False):
        super().__init__()
        self.top, self.masked, self.wide = top, masked, wide
        self.before, self.router = nn.Linear(width, width), nn.Linear(width, experts)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * inner) / width**0.5)
        self.out = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, x):
        x = self.before(x).tanh()  # fuses with the gather, as a norm would
        scores, chosen = self.router(x).float().softmax(-1).topk(self.top, -1)
        scores = scores if self.wide else scores.to(x.dtype)
        expert, order = chosen.reshape(-1).sort()
        weights = scores.reshape(-1)[order].unsqueeze(-1)
        last = len(self.into) - self.masked  # the last expert is elsewhere
        counts = torch.stack([(expert == n).sum() for n in range(last)])
        elsewhere, ends = (expert >= last).unsqueeze(-1), counts.cumsum(0).to(torch.int32)

        def times(rows, matrices):
            made = torch._grouped_mm(rows, matrices[:last].contiguous(), offs=ends)
            return made.masked_fill(elsewhere, 0) if self.masked else made

        rows = x[order // self.top]
        rows = rows.masked_fill(elsewhere, 0) if self.masked else rows  # and so their gradients
        gate, value = times(rows, self.into).chunk(2, -1)
        rows = times(F.silu(gate) * value, self.out) * weights
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return rows[places].view(len(x), self.top, -1).sum(1).to(x.dtype)


def routed(device="cpu", rows=96, **facts):
    """(such a model in bf16, what it reads)."""
    torch.manual_seed(0)
    model = Routed(**facts).to(device, torch.bfloat16)
    return model, torch.randn(rows, model.before.in_features).to(device, torch.bfloat16)


def loss_of(model):
    """What is to be minimised, so that every row's gradient differs."""
    return lambda x: (
        model(x).float().sin() * torch.linspace(0, 1, len(x), device=x.device)[:, None]
    ).sum()


def gradients(model, x, loss=loss_of):
    """Of the parameters by name, in fp32, and the input's."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    loss(model)(x).backward()
    found = {name: p.grad.float() for name, p in model.named_parameters()}
    return found | {"x": x.grad.float()}
