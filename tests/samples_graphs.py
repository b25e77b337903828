"""Beginnings of graphs that tests make by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def given(
    graph: fx.Graph, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], device: str = "cpu"
) -> list[fx.Node]:
    """A placeholder of each name, for a fake tensor of that size and dtype."""
    mode, nodes = FakeTensorMode(), []
    for name, (size, dtype) in tensors.items():
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(size, dtype=dtype, device=device)
        nodes.append(node)
    return nodes
