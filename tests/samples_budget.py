"""Models that tests of budgets share."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=64, dropout=0.0):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Broken(nn.Sequential):
    """One graph a block."""

    def forward(self, x):
        for block in self:
            x = block(x)
            torch._dynamo.graph_break()
        return x
