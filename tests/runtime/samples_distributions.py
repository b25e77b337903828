"""Gradients as they come, and not only Gaussian: for the tests of quantisers.

Each function takes (rows, outputs) and gives a grad_output, fp32 [rows, outputs].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Distribution = Callable[[int, int], Tensor]


def sparse(share: float) -> Distribution:
    """``share`` of the entries, anywhere: top-k units, routers, max pools."""
    return lambda rows, outputs: torch.randn(rows, outputs) * (torch.rand(rows, outputs) < share)


def spiked(rows: int, outputs: int) -> Tensor:
    """One large entry a row over a background of a thousandth."""
    g = torch.randn(rows, outputs) * 1e-3
    g[torch.arange(rows), torch.randint(0, outputs, (rows,))] += 1
    return g


def unseen_spikes(rows: int, outputs: int) -> Tensor:
    """Seldom, and in columns that a sample of some hundred rows finds all but empty."""
    g = torch.randn(rows, outputs) * 1e-3
    at = torch.arange(7 % rows, rows, 97)
    g[at, torch.randint(0, min(40, outputs), (len(at),))] = 1.0
    return g


def _zipf(n: int) -> Tensor:
    return 1 / torch.arange(1, n + 1).float()


def untrained_softmax(rows: int, classes: int) -> Tensor:
    """Cross entropy before training."""
    return 1 / classes - F.one_hot(torch.randint(0, classes, (rows,)), classes)


def softmax(rows: int, classes: int) -> Tensor:
    """Cross entropy whose classes' frequencies, Zipf's, have been learned."""
    chosen = torch.multinomial(_zipf(classes), rows, replacement=True)
    return _zipf(classes) / _zipf(classes).sum() - F.one_hot(chosen, classes)


def multi_label(rows: int, tags: int) -> Tensor:
    """Binary cross entropy over tags whose base rates have been learned."""
    found = torch.zeros(rows, tags)
    found.scatter_(1, torch.multinomial(_zipf(tags), rows * 4, replacement=True).view(rows, 4), 1.0)
    return found.mean(0) - found


def log_normal(rows: int, outputs: int) -> Tensor:
    """Rows and columns of all sizes."""
    return (
        torch.randn(rows, outputs) * (1.5 * torch.randn(rows, 1)).exp() * torch.randn(outputs).exp()
    )


def huge_column(rows: int, outputs: int) -> Tensor:
    """One output a hundred times as large as others."""
    return torch.randn(rows, outputs) * (1 + 99.0 * (torch.arange(outputs) == outputs // 2))


def few_rows(rows: int, outputs: int) -> Tensor:
    """Zeros but for 2 % of the rows: padding, a class token."""
    return torch.randn(rows, outputs) * (torch.rand(rows, 1) < 0.02)


def blocks(rows: int, outputs: int) -> Tensor:
    """Two blocks of other sizes, zeros elsewhere: experts."""
    g = torch.zeros(rows, outputs)
    g[: rows // 3, : outputs // 5] = torch.randn(rows // 3, outputs // 5)
    g[rows // 2 :, outputs // 2 :] = torch.randn(rows - rows // 2, outputs - outputs // 2) * 1e-2
    return g


DISTRIBUTIONS: dict[str, Distribution] = {
    "Gaussian": torch.randn,
    "10 % of entries": sparse(0.1),
    "1 % of entries": sparse(0.01),
    "0.1 % of entries": sparse(0.001),
    "one spike a row": spiked,
    "spikes where no sample sees them": unseen_spikes,
    "softmax, untrained": untrained_softmax,
    "softmax, Zipf labels": softmax,
    "multi-label, base rates learned": multi_label,
    "log-normal rows and columns": log_normal,
    "one huge column": huge_column,
    "2 % of rows": few_rows,
    "blocks": blocks,
}
"""By what they are."""
