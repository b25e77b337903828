"""The tensors that cross from forward to backward: the memory a training step holds."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from hot_compile.passes.graph import module_path
from hot_compile.passes.site import hint


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One tensor kept for the backward (parameters and user inputs are held anyway: not listed)."""

    name: str
    """The forward graph's node."""
    module: str
    """Path of the module that produced it, '' if unknown."""
    dtype: str
    shape: tuple[str, ...]
    bytes: int
    packed: bool
    """A part of what one of our operators made of a layer's x."""


def crossing(forward: fx.GraphModule, num_fwd_outputs: int) -> tuple[Crossing, ...]:
    """What ``forward`` returns beyond its user outputs, largest first.

    Args:
        forward: the forward module the partitioner made: [user outputs][saved tensors][symbols].
        num_fwd_outputs: how many of its outputs the user sees.
    """
    output = next(iter(reversed(forward.graph.nodes)))
    seen = set(output.args[0][:num_fwd_outputs])
    kept = []
    for node in output.args[0][num_fwd_outputs:]:
        if not isinstance(node, fx.Node) or node.op == "placeholder" or node in seen:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            seen.add(node)
            kept.append(_crossing(node, value))
    return tuple(sorted(kept, key=lambda c: (-c.bytes, c.name)))


def _crossing(node: fx.Node, value: torch.Tensor) -> Crossing:
    size = value.dtype.itemsize
    for length in value.shape:
        size *= hint(length)
    return Crossing(
        name=node.name,
        module=module_path(node) or "",
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(str(length) for length in value.shape),
        bytes=size,
        packed=_is_packed(node),
    )


def _is_packed(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and getattr(source.target, "namespace", "") == "hot"
