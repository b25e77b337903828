"""The cut moves past what tolerates no rounding: the results cross instead, compressed."""

import pytest
import torch
import torch.nn.functional as F
from samples_storage import ALL, crossing
from torch import nn

from hot_compile.testing import cosine, hot_step

WIDTH, TOKENS = 64, 48


class Normed(nn.Module):
    """A norm on the whole of a layer's output behind GELU, or on a part of it."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.wide, self.narrow = nn.Linear(WIDTH, parts * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        first, *rest = F.gelu(self.wide(x)).chunk(self.parts, dim=-1)
        first = self.norm(first)
        for part in rest:
            first = first * part
        return x + self.narrow(first)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_norm_on_a_part_of_what_is_saved(parts):
    torch.manual_seed(0)
    model = nn.Sequential(Normed(parts), Normed(parts))
    x = torch.randn(4, TOKENS, WIDTH)

    def loss(x):
        return model(x).sin().mean()

    loss(x).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    large = [c for c in crossing(loss, x) if c.bytes_before >= x.numel()]
    assert all("a loss" in c.reason for c in large if c.scheme == "exact"), large
    model.zero_grad()
    hot_step(loss, x, options=ALL)
    for name, p in model.named_parameters():
        assert cosine(p.grad, exact[name]) > 0.98, name
