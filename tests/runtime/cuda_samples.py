"""Inputs of the CUDA tests, and the comparison of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (1, 16), (15, 17), (17, 31), (130, 200), (197, 264), (4095, 48), (512, 768)]


def sample(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Gaussian with rows and columns of very different size, on the CPU."""
    x = torch.randn(rows, cols)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
    x *= torch.exp2(torch.randint(-3, 4, (1, cols)).float())
    return x.to(dtype)


def check_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert len(got) == len(want)
    for n, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        mine = mine.cpu()
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert mine.is_contiguous()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        assert same.all(), (
            f"output {n}: {(~same).sum()} of {same.numel()} differ: {_first(same, mine, theirs)}"
        )


def _first(same: Tensor, mine: Tensor, theirs: Tensor) -> str:
    at = tuple((~same).nonzero()[0].tolist())
    return f"at {at} got {mine[at].item()}, expected {theirs[at].item()}"


def strange(kind: str, dtype: torch.dtype) -> Tensor:
    """Rows and columns of one odd sort of number amid ordinary ones."""
    x = sample(70, 96, dtype)
    value = {
        "nan": float("nan"),
        "inf": float("inf"),
        "-inf": float("-inf"),
        "zero": 0.0,
        "largest": torch.finfo(dtype).max,
        "smallest": torch.finfo(dtype).tiny,
        "subnormal": torch.finfo(dtype).tiny / 4,
        "constant": 3.0,
        "power": 2.0**-7,
    }[kind]
    x[3], x[:, 5] = value, value
    x[40:, 20:40] = value
    return x


def layouts(x: Tensor) -> dict[str, Tensor]:
    """``x`` on the device in memory layouts that a kernel might stumble over."""
    rows, cols = x.shape
    room = torch.randn(rows + 2, cols + 24, device="cuda").to(x.dtype)
    inside, off = room[1:-1, 8:-16], room[1:-1, 3 : cols + 3]
    flat = torch.zeros(rows * cols + 1, device="cuda", dtype=x.dtype)[1:].view(rows, cols)
    turned = torch.empty(cols, rows, device="cuda", dtype=x.dtype).t()
    wide = torch.empty(rows, 2 * cols, device="cuda", dtype=x.dtype)[:, ::2]
    for view in (inside, off, flat, turned, wide):
        view.copy_(x)
    names = ("row stride", "misaligned rows", "misaligned", "transposed", "column stride")
    return dict(zip(names, (inside, off, flat, turned, wide), strict=True))
