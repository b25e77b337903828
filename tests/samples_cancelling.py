"""Small training steps whose gradients nearly cancel, where no graph shows it."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs, outputs, act=nn.GELU, norm=True, depth=2, width=256):
    layers = [nn.Linear(inputs, width), act()]
    for _ in range(depth - 1):
        layers += [nn.LayerNorm(width)] * norm + [nn.Linear(width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def near_pairs(rows=512, width=64, apart=0.05):
    base = torch.randn(rows, width)
    return torch.cat([base, base + apart * torch.randn(rows, width)])


def halves(y):
    return y.chunk(2)


def reward(f, x):
    good, bad = halves(f(x))
    return -F.logsigmoid(good - bad).mean()


def critic(f, x):
    return f(x[:512]).mean() - f(x[512:]).mean()


def hinge(f, x):
    real, fake = halves(f(x))
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def signs(f, x):
    labels = torch.ones(len(x), 1)
    labels[512:] = -1
    return -(labels * f(x)).mean()


def by_index(f, x):
    y, rows = f(x), torch.arange(512)
    return (y[rows] - y[rows + 512]).square().mean()


def choice(f, x):
    both = torch.cat([f(x[:512]), f(x[512:])], 1)
    return F.cross_entropy(both, torch.zeros(512, dtype=torch.long))


def siamese_cosine(f, x):
    a, b = halves(f(x))
    return (1 - F.cosine_similarity(a, b)).mean()


def pearson(f, x):
    y, target = f(x)[:, 0], x[:, 0]
    y, target = y - y.mean(), target - target.mean()
    return 1 - (y * target).sum() / (y.norm() * target.norm())


def triplets(f, x):
    y = f(x)
    near = torch.cdist(y[:256], y[512:768])
    rows = torch.arange(256)
    positive, negative = near.diagonal(), near.masked_fill(rows[:, None] == rows, 100).amin(1)
    return F.relu(positive - negative + 0.1).mean()


def differences(f, x):
    h = 0.02
    ahead, here, behind = f(torch.cat([x + h, x, x - h])).chunk(3)
    return ((ahead - 2 * here + behind) / h**2).square().mean()


def offset(rows=1024, width=64):
    return torch.randn(rows, width) + 10


def two_towers(f, x):
    a, b = f(x[:512]), f(x[512:])
    return F.cross_entropy(a @ b.t(), torch.arange(512))


def preference(f, x):
    good, bad = halves(f(x).log_softmax(1)[:, 0])
    return -F.logsigmoid(0.1 * (good - bad)).mean()


def covariances(f, x):
    a, b = halves(f(x))
    return (a.T.cov() - b.T.cov()).square().mean()


def means(f, x):
    a, b = halves(f(x))
    return (a.mean(0) - b.mean(0)).square().sum()


def shifted(f, x):
    return (f(x) - f(x + 0.02 * x.roll(1, 0))).square().mean()


class Dropped(nn.Sequential):
    """Two passes of one batch, which differ by dropout only."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.1))


def r_drop(f, x):
    a, b = f(x).log_softmax(1), f(x).log_softmax(1)
    return F.kl_div(a, b, log_target=True, reduction="batchmean")


CASES = {
    "reward pairs": (lambda: mlp(64, 1), reward, near_pairs),
    "critic": (lambda: mlp(64, 1), critic, near_pairs),
    "hinge critic": (lambda: mlp(64, 1), hinge, near_pairs),
    "labels of one and minus one": (lambda: mlp(64, 1), signs, near_pairs),
    "pairs by index": (lambda: mlp(64, 8), by_index, near_pairs),
    "choice of two": (lambda: mlp(64, 1), choice, near_pairs),
    "siamese cosine": (lambda: mlp(64, 32), siamese_cosine, near_pairs),
    "Pearson": (lambda: mlp(64, 1), pearson, offset),
    "mined triplets": (lambda: mlp(64, 32), triplets, offset),
    "finite differences": (
        lambda: mlp(2, 1, nn.Tanh, norm=False, depth=3), differences,
        lambda: torch.rand(1024, 2) * 2 - 1,
    ),
    "two towers": (lambda: mlp(64, 32), two_towers, near_pairs),
    "preference": (lambda: mlp(64, 8), preference, near_pairs),
    "covariances": (lambda: mlp(64, 16), covariances, near_pairs),
    "means": (lambda: mlp(64, 16), means, near_pairs),
    "shifted": (lambda: mlp(64, 8), shifted, offset),
    "R-Drop": (lambda: Dropped(*mlp(64, 8)), r_drop, lambda: torch.randn(512, 64)),
}  # fmt: skip
"""(model, loss of (f, x), x), each made anew."""
