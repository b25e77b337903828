"""Keys and values that heads share are handed to attention as they are, not repeated for each head.

In grouped-query and multi-query attention several heads read one key. Models repeat it for them:
copies are written, once more in the backward, and their gradients are summed. Torch's fast kernels
take what is shared (``enable_gqa``), and compute the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode

from .attention_masks import ATTENTION, argument, may_be_written, traced_with

_HEADS = 1
"""The dimension of heads, of (batch, heads, tokens, channels)."""
_COPIES = {"clone", "contiguous", torch.clone}
_MOVES = {"permute", "transpose", torch.permute, torch.transpose}
_WIDEN = {"broadcast_to", "expand", "expand_as", "repeat", torch.broadcast_to}
_MERGE = {"flatten", "reshape", "view", torch.flatten, torch.reshape}
_REPEAT = {"repeat_interleave", torch.repeat_interleave}

Steps = tuple[tuple[Any, ...], ...]
"""Names of a tensor's methods, each with its arguments."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A key or a value, before each head got its own."""

    source: fx.Node
    steps: Steps
    """What makes it (batch, shared heads, tokens, channels)."""
    between: tuple[fx.Node, ...]
    """The nodes from ``source`` to what attention reads."""


def shared_heads(attention: fx.Node) -> tuple[Shared, Shared] | None:
    """The key and the value of an attention, as torch's kernels can take them too.

    None if they were not repeated, by the same number, or may have been written to since; with
    dropout; and where torch has no kernel for it: on CUDA in fp32, or with a mask.
    """
    operands: Any = [traced_with(operand) for operand in attention.args[:3]]
    if len(operands) < 3 or not all(isinstance(x, FakeTensor) and x.ndim == 4 for x in operands):
        return None  # a subclass of its own, or of another level (vmap)
    if argument(attention, 4, "dropout_p"):
        return None
    key, value = (_shared(operand, _HEADS) for operand in attention.args[1:3])
    if key is None or value is None:
        return None
    given = [operands[0], *(moved(traced_with(x.source), x.steps) for x in (key, value))]
    heads = [[x.shape[_HEADS] for x in some] for some in (operands, given[1:])]  # type: ignore
    alike = all(same_sizes(some[1:], some[:-1]) for some in heads)
    if not alike or not _has_kernel(attention, given):  # type: ignore[arg-type]
        return None
    between = {*key.between, *value.between}
    return None if may_be_written(between, attention.graph.nodes) else (key, value)


def moved(value: Any, steps: Any) -> Any:
    """What methods make of a tensor, one after the other."""
    with torch.enable_grad():
        for name, *args in steps:
            value = getattr(value, name)(*args)
    return value


def _has_kernel(attention: fx.Node, operands: list[Tensor]) -> bool:
    """Torch does not compute it as plain products, for which it repeats what is shared."""
    dtype = attention.meta["example_value"].dtype  # that which autocast makes of its operands
    given: Any = [operand.to(dtype) for operand in operands]
    rest: Any = fx.node.map_arg(attention.args[3:], traced_with)
    how: Any = fx.node.map_arg({**attention.kwargs, "enable_gqa": True}, traced_with)
    with given[0].fake_mode, _Called() as called, torch.enable_grad():
        ATTENTION(*given, *rest, **how)
    return any("attention" in name for name in called.names)


class _Called(TorchDispatchMode):
    """Inside, the operators that torch calls are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def _shared(node: Any, dim: int) -> Shared | None:
    """What ``node`` repeats along ``dim``: each slice several times, and then the next."""
    value = traced_with(node)
    given: Any = node.args[0] if value is not None and node.args else None
    source = traced_with(given)
    if value is None or source is None:
        return None
    found = None
    if node.target in _COPIES:
        found = _shared(given, dim)
    elif node.target in _MOVES and not node.kwargs:
        found = _shared_and_moved(node, value.ndim, dim)
    elif node.target in _REPEAT and isinstance(argument(node, 1, "repeats"), int):
        found = Shared(given, (), ()) if _alike(value, source, but=dim) else None
    elif node.target in _WIDEN:
        one = _alike(value, source, but=dim) and statically_known_true(source.shape[dim] == 1)
        found = Shared(given, (), ()) if one else None
    elif node.target in _MERGE:
        found = _shared_and_merged(given, value, dim)
    return found and dataclasses.replace(found, between=(node, *found.between, found.source))


def _shared_and_moved(node: fx.Node, ndim: int, dim: int) -> Shared | None:
    name = node.target if isinstance(node.target, str) else node.target.__name__  # type: ignore
    step = (name, *node.args[1:])
    before = moved(torch.empty(*range(2, 2 + ndim), device="meta"), [step]).shape[dim] - 2
    found = _shared(node.args[0], before)
    return found and dataclasses.replace(found, steps=(*found.steps, step))


def _shared_and_merged(wide: Any, value: Tensor, dim: int) -> Shared | None:
    """Of a dimension beside that of heads, in which each was repeated before both were one."""
    between = []
    while isinstance(wide, fx.Node) and wide.target in _COPIES and wide.args:
        between.append(wide)
        wide = wide.args[0]
    by, source = traced_with(wide), traced_with(wide.args[0] if wide.args else None)
    if by is None or source is None or wide.target not in _WIDEN or by.ndim != value.ndim + 1:
        return None
    one = statically_known_true(source.shape[dim + 1] == 1) and _alike(by, source, but=dim + 1)
    sizes = [*by.shape[:dim], by.shape[dim] * by.shape[dim + 1], *by.shape[dim + 2 :]]
    if not one or not same_sizes(value.shape, sizes):
        return None
    return Shared(wide.args[0], (("squeeze", dim + 1),), (*between, wide))


def _alike(value: Tensor, source: Tensor, but: int) -> bool:
    """Their sizes are the same except one."""
    sizes = [[*x.shape[:but], *x.shape[but + 1 :]] for x in (value, source)]
    return value.ndim == source.ndim and same_sizes(*sizes)


def same_sizes(some: Any, others: Any) -> bool:
    """As many, and known to be the same without a guard."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(statically_known_true(a == b) for a, b in pairs)
