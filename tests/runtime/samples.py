"""Inputs of the providers' tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    *((1, 1), (1, 16), (1, 1000), (15, 17), (15, 33), (17, 16), (17, 31), (197, 100), (300, 64)),
    *((128, 65), (129, 20), (0, 5), (5, 0), (0, 0)),
    *(pytest.param(s, marks=pytest.mark.gpu) for s in ((130, 200), (197, 264), (4095, 48))),
    *(pytest.param(s, marks=pytest.mark.gpu) for s in ((512, 768), (1000, 130))),
)
SPECIAL = (
    *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.0, 2.0**-7, 3.4e38, 65504.0),
    *(1e-40, -1e-45, 2.0**-117, 2.0**-126),
)


def sample(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian with rows and columns of very different size."""
    x = torch.randn(rows, cols)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
    x *= torch.logspace(-3, 3, max(cols, 1))[:cols]
    return x.to(dtype)


def strange(value: float, dtype: torch.dtype = torch.float32, everywhere: bool = False) -> Tensor:
    """Rows, columns and a block of one odd number amid ordinary ones, or nothing else."""
    x = torch.full((150, 40), value) if everywhere else sample(150, 40)
    x[3, 5] = x[140, 39] = value
    x[:, 7] = x[9] = 0
    x[20], x[:, 4] = value, value
    x[60:, 20:30] = value
    return x.to(dtype)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """``x`` in memory layouts that a kernel might stumble over."""
    rows, cols = x.shape

    def room() -> Tensor:
        return x.new_ones(rows + 2, cols + 24)

    views = {
        "row stride": room()[1:-1, 8:-16],
        "misaligned rows": room()[1:-1, 3 : cols + 3],
        "misaligned": x.new_zeros(rows * cols + 1)[1:].view(rows, cols),
        "transposed": x.new_empty(cols, rows).t(),
        "column stride": x.new_empty(rows, 2 * cols)[:, ::2],
    }
    for view in views.values():
        view.copy_(x)
    return views


LAYOUTS = ("row stride", "misaligned rows", "misaligned", "transposed", "column stride")
