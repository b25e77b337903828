"""What rules about wide tensors ask of nodes and of each other's results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.base.operators import CASTS, RESHAPES, SQUEEZES
from hot_compile.passes.base.site import hint
from hot_compile.passes.head.algebra import (
    ONE,
    Basis,
    Cut,
    Expr,
    Term,
    Wide,
    Window,
    joined,
)
from hot_compile.passes.head.sizes import Size, Symbolic, minus, plus, size_of

Shape = tuple[Any, ...]
COPIES = CASTS | {aten.alias.default, aten.clone.default}
FLAT = RESHAPES | SQUEEZES | COPIES
"""They keep the order in which rows are counted."""
_FOREVER = 2**62
"""A slice that ends here or later ends with what it slices."""


class NotUnderstood(Exception):
    """Why these logits cannot be left out."""


def times(a: Wide, b: Wide) -> Wide | None:
    """Their product, if ``b`` is a cap's slope, a number per row or per column, or ``a``'s tanh."""
    if _is_slope(b) and not any(t.slope for t in a.terms):
        terms = tuple(Term(t.basis, t.coefficient, True) for t in a.terms)
        return Wide(terms, a.axis, a.window)
    if len(b.terms) != 1 or b.terms[0].slope:
        return Wide((), a.axis, a.window) if not b.terms else None
    (factor,) = b.terms
    if factor.basis.kind == "one":
        return a.scaled(factor.coefficient)
    if factor.basis.kind == "column":
        terms = tuple(_weighted(t, factor.basis.what) for t in a.terms)
        return (
            Wide(joined(terms), a.axis, a.window).scaled(factor.coefficient) if all(terms) else None
        )
    if factor.basis.kind == "tanh" and a.terms == b.terms:
        square = Term(Basis("tanh2", factor.basis.what), factor.coefficient * factor.coefficient)
        return Wide((square,), a.axis, a.window)
    return None


def _weighted(term: Term, column: fx.Node) -> Any:
    kind = term.basis.kind
    if kind == "onehot":
        weight = Expr("take", (column, term.basis.what))
        return Term(term.basis, term.coefficient * weight, term.slope)
    if kind == "one":
        return Term(Basis("column", column), term.coefficient, term.slope)
    if kind in ("y", "tanh"):
        return Term(Basis("weighted", (term.basis, column)), term.coefficient, term.slope)
    return None


def _is_slope(found: Wide) -> bool:
    """1 - tanh^2."""
    parts = {t.basis.kind: t.coefficient.constant for t in found.terms if not t.slope}
    return len(found.terms) == 2 and parts == {"one": 1.0, "tanh2": -1.0}


def cut_of(node: fx.Node, shape: Shape, axis: int) -> Cut | None:
    """The rows that a slice (or slice_scatter) of a tensor of ``shape`` is about; None: all."""
    first = 1 if node.target is aten.slice.Tensor else 2
    given, usual = args_of(node)[first:], [0, None, None, 1]
    dim, start, stop, step = list(given) + usual[len(given) :]
    dim = dim % len(shape)
    whole = size_of(shape[dim])
    start, stop = end_of(start, 0, whole), end_of(stop, whole, whole)
    if (start, stop) == (0, whole):
        return None
    if dim == axis:
        raise NotUnderstood("some of the vocabulary is cut off")
    left = size_of(shape_of(node if first == 1 else args_of(node)[1])[dim])
    if step != 1 or minus(stop, start) != left:
        raise NotUnderstood("rows are picked whose number is not known")
    return Cut(without(shape, axis, drop=True), dim - (dim > axis), start, stop)


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


def selected(node: fx.Node, shape: Shape, axis: int) -> Cut:
    """The rows that a select (or select_scatter) of a tensor of ``shape`` is about."""
    dim, place = args_of(node)[1 if node.target is aten.select.int else 2 :][:2]
    dim = dim % len(shape)
    start = end_of(place, 0, size_of(shape[dim]))
    if dim == axis:
        raise NotUnderstood("one column of the logits is read")
    return Cut(without(shape, axis, drop=True), dim - (dim > axis), start, plus(start, 1))


def picks_each_row(gather: fx.Node, axis: int) -> bool:
    """A gather along ``axis`` has as many rows as its source; may add the guard that it has."""
    sizes = zip(shape_of(args_of(gather)[0]), shape_of(gather), strict=True)
    return all(bool(a == b) for dim, (a, b) in enumerate(sizes) if dim != axis)


def apart(one: Window, other: Window) -> bool:
    """Two parts of the rows that have none in common."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return (a.lead, a.dim) == (b.lead, b.dim) and (_before(a, b) or _before(b, a))
    return False


def _before(a: Cut, b: Cut) -> bool:
    end, start = a.stop, b.start
    return end == start or (isinstance(end, int) and isinstance(start, int) and end < start)


def column_of(node: fx.Node) -> tuple[Expr, fx.Node]:
    """(factor, base [O]) of what is the same in every row."""
    base = strip(node, FLAT | {aten.expand.default})
    if base.target is aten.mul.Tensor:
        for scalar, other in (args_of(base), args_of(base)[::-1]):
            if isinstance(scalar, fx.Node) and numel(scalar) == 1 and isinstance(other, fx.Node):
                factor, column = column_of(other)
                return Expr("rows", (scalar, None)) * factor, column
    return ONE, base


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
        place = {aten.full.default: 1, aten.scalar_tensor.default: 0}.get(node.target)
        return place is not None and bool(args_of(node)[place] == 0)
    return bool(node == 0)
