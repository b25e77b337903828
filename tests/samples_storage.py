"""A block and a way to see what crosses, shared by the tests of storage."""

import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.testing import cosine, hot_step

ALL = {"min_gain": 0, "keep_head": False, "memory_min_bytes": 1024}


def crossing(function, *inputs, **options):
    """Everything that crosses, by the module that made it; the function's parameters get grads."""
    _, graphs = hot_step(function, *inputs, options={**ALL, **options})
    return [c for graph in graphs for c in graph.crossing]


def crossing_right(model, loss, x, *others, floor, dtype=None, **options):
    """Everything that crosses in a step of ``loss``, ``model`` and ``x`` in ``dtype``; gradients of
    its parameters have a cosine of more than ``floor`` with exact ones."""
    loss(x, *others).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.to(dtype).zero_grad()
    found = crossing(loss, x.to(dtype or x.dtype), *others, **options)
    for name, p in model.named_parameters():
        assert cosine(p.grad.to(exact[name].dtype), exact[name]) > floor, name
    return found


class Block(nn.Module):
    """Pre-norm transformer block on fused attention: causal, rotary, grouped keys, or masked."""

    def __init__(self, width=128, heads=4, kv_heads=4, causal=False, rotary=False, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.rotary = heads, kv_heads, causal, rotary
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * (width // heads))
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def split(self, x, heads):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def rotate(self, x):
        angle = torch.arange(x.shape[-2]).view(-1, 1) * torch.rand(1, x.shape[-1])
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()

    def forward(self, x, mask=None):
        y = self.norm1(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = self.split(self.q(y), self.heads), *(self.split(t, self.kv_heads) for t in (k, v))
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
        gqa = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=gqa
        )
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
