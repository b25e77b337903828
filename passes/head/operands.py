"""What rules about wide tensors ask of nodes and of each other's results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.operators import CASTS, RESHAPES, SQUEEZES
from hot_compile.passes.base.site import hint
from hot_compile.passes.head.sizes import Size, Symbolic, minus, plus, size_of

Shape = tuple[Any, ...]
COPIES = CASTS | {aten.alias.default, aten.clone.default}
FLAT = RESHAPES | SQUEEZES | COPIES
"""They keep the order in which rows are counted."""
_FOREVER = 2**62
"""A slice that ends here or later ends with what it slices."""


class NotUnderstood(Exception):
    """Why these logits cannot be left out."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Some of the rows: ``start:stop`` along ``dim`` of what the rows were before, ``lead``."""

    lead: tuple[Size, ...]
    dim: int
    start: Size
    stop: Size

    @property
    def left(self) -> tuple[Size, ...]:
        """The rows' shape afterwards."""
        length = minus(self.stop, self.start)
        return (*self.lead[: self.dim], length, *self.lead[self.dim + 1 :])


Window = tuple[Cut, ...]


def end_of(given: Any, usual: Size, whole: Size) -> Size:
    """Where a slice begins or ends, from the first of ``whole`` on; beyond it is its end."""
    if given is None:
        return usual
    place = size_of(given)
    if not isinstance(place, int):
        return place
    if place < 0:
        return max(0, whole + place) if isinstance(whole, int) else plus(whole, place)
    return min(place, whole) if isinstance(whole, int) else whole if place >= _FOREVER else place


def same_rows(a: fx.Node, b: fx.Node, axis: int) -> bool:
    """They have as many rows (``axis``: of their columns); may add the guard that it is so."""
    sizes = zip(shape_of(a), shape_of(b), strict=True)
    return all(bool(a == b) for dim, (a, b) in enumerate(sizes) if dim != axis)


def signature(node: Any, depth: int = 6) -> str:
    """Text that is equal for nodes that compute the same numbers in the same order."""
    if not isinstance(node, fx.Node):
        return repr(node)
    while node.target in FLAT - CASTS:
        node = args_of(node)[0]
    if node.op != "call_function" or not depth:
        return node.name
    if node.target is aten.scalar_tensor.default:
        return repr(args_of(node)[0])
    inside = ",".join(signature(arg, depth - 1) for arg in args_of(node))
    return f"{node.target}({inside})" if not node.kwargs else node.name


def is_tensor(node: fx.Node) -> bool:
    """It is no size."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_random(node: fx.Node) -> bool:
    """It draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def args_of(node: Any) -> tuple[Any, ...]:
    """A node's arguments, of which rules know what they are."""
    return node.args


def shape_of(node: Any) -> Shape:
    """Sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def has_size(node: fx.Node, size: Any) -> bool:
    """Some dimension of a node's tensor has this size."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(same_size(n, size) for n in value.shape)


def numel(node: Any) -> int:
    """Number of elements, symbolic sizes by hint."""
    return math.prod(map(hint, shape_of(node)))


def rank_of(node: Any) -> int:
    """Number of dimensions."""
    return len(shape_of(node))


def without(shape: Sequence[Any], axis: int, drop: bool = False) -> Shape:
    """``shape`` with 1 (or nothing) in the place of ``axis``; what is symbolic as ``Symbolic``."""
    known = [size_of(n) for n in shape]
    return (*known[:axis], *(() if drop else (1,)), *known[axis + 1 :])


def count(shape: Shape) -> int:
    """Elements of a shape as ``Expr`` holds it."""
    return math.prod(n.hint if isinstance(n, Symbolic) else n for n in shape)


def is_one(size: Any) -> bool:
    """A size that is 1, known as such."""
    return isinstance(size, int) and size == 1


def same_size(a: Any, b: Any) -> bool:
    """Equal sizes, without adding a guard when either is symbolic."""
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def is_zero(node: Any) -> bool:
    """The number, or a tensor full of it."""
    if isinstance(node, fx.Node):
        filled: dict[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}
        place = filled.get(node.target)
        return place is not None and bool(args_of(node)[place] == 0)
    return bool(node == 0)


def is_fma(node: fx.Node) -> bool:
    """a * b + c in one; not every torch has the operator, nor from its start."""
    return str(node.target) == "prims.fma.default"
