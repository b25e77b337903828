"""Sizes that may be symbolic, compared without adding a guard and written as nodes when needed."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.site import hint


@dataclasses.dataclass(frozen=True)
class Symbolic:
    """A size that is not known until run time: comparing it must add no guard."""

    expr: sympy.Expr
    hint: int


Size = int | Symbolic


def size_of(value: Any) -> Size:
    """A number, a ``SymInt``, or a node that holds either."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return Symbolic(value.node.expr, hint(value)) if isinstance(value, torch.SymInt) else value


def plus(a: Size, b: Size, factor: int = 1) -> Size:
    """a + factor * b."""
    (one, some), (other, more) = _parts(a), _parts(b)
    total = one + factor * other
    return int(total) if total.is_number else Symbolic(total, some + factor * more)


def minus(a: Size, b: Size) -> Size:
    """a - b."""
    return plus(a, b, -1)


def _parts(size: Size) -> tuple[sympy.Expr, int]:
    return (size.expr, size.hint) if isinstance(size, Symbolic) else (sympy.Integer(size), size)


def as_arguments(emit: Emitter, sizes: Iterable[Size]) -> list[int | fx.Node]:
    """``sizes`` for an operator: what is symbolic is worked out of the graph's inputs.

    Raises:
        ValueError: a size is more than sums, products and quotients of their sizes.
    """
    known = emit.known
    return [_node(emit, known(s.expr)) if isinstance(s, Symbolic) else s for s in sizes]


def _node(emit: Emitter, expr: sympy.Expr) -> int | fx.Node:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return emit.symbol(expr)
    divided = isinstance(expr, FloorDiv)
    if not (expr.is_Add or expr.is_Mul or divided):
        raise ValueError(f"got the size {expr}; only sums, products and quotients can be written")
    parts = [_node(emit, part) for part in expr.args]
    if divided:
        return emit(operator.floordiv, *parts)
    return functools.reduce(
        functools.partial(emit, operator.add if expr.is_Add else operator.mul), parts
    )
