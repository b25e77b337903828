"""Tensors without a dimension that cross to the backward: kept as they are, the rest compressed."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_compile.testing import hot_step


def scale_invariant(y):
    """A scalar of the loss, its mean, is read by the backward."""
    d = F.softplus(y).log()
    return (d.square().mean() - 0.5 * d.mean() ** 2).sqrt()


LOSSES = {
    "a mean": scale_invariant,
    "a norm": lambda y: y / y.norm(),
    "a maximum": lambda y: y.sin() / y.abs().amax(),
    "a product of scalars": lambda y: y.mean().exp() * y.std().exp(),
    "a softmax of one number": lambda y: y * y.mean().softmax(0) * y.mean().exp(),
    "a half precision scalar": lambda y: y * y.mean().to(torch.bfloat16).exp(),
}


@pytest.mark.parametrize(
    "least",
    [0, pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(2**16, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_scalar_that_crosses(name, least, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    options = {"min_gain": 0, "memory_min_bytes": least}
    with caplog.at_level(logging.WARNING, "hot_compile"):
        _, graphs = hot_step(
            lambda x: LOSSES[name](model(x)).sum(), torch.randn(128, 64), options=options
        )
    assert not caplog.records
    assert graphs[0].held_bytes < sum(c.bytes_before for c in graphs[0].crossing)
    scalars = [c for c in graphs[0].crossing if not c.shape]
    assert all(c.bytes == c.bytes_before for c in scalars)
