"""What tests of real models share: real images, a model with its loss, a few steps of training."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def digit_batch(size, count):
    """Scikit-learn's real digits as RGB images of ``size`` pixels."""
    data = load_digits()
    images = torch.tensor(data.images[:count], dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    return images.contiguous(), torch.tensor(data.target[:count])


class MLP(nn.Module):  # torch 2.11 compiles no nn.Sequential in place, by any backend
    """64 to 96 to 64 features."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Busy(nn.Module):
    """All that a second run could disturb: batch norm, an input changed in place, and dropout."""

    def __init__(self, dropped=0.0):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)
        self.dropped = dropped
        self.register_buffer("count", torch.zeros(64))

    def forward(self, x):
        self.count.add_(1)
        y = self.norm(self.fc1(x)).relu()
        y = F.dropout(y, self.dropped) if self.dropped else y
        return self.fc2(y) + self.count


class WithLoss(nn.Module):
    """A classifier that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y)


def warm(model, inputs, steps):
    """A few exact training steps: gradients at initialisation say little (docs: LQS)."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).backward()
        optimizer.step()
    optimizer.zero_grad()
