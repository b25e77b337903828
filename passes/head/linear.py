"""Whether a head's gradient is a scalar tangent times what the forward already knows.

Then the gradients can be made in the forward, with 1 in the tangent's place, and the backward only
multiplies them by it: three products instead of four.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, closure, is_tangent, made_of_tangents
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.head.algebra import Expr
from hot_compile.passes.head.emission import RowWriter
from hot_compile.passes.head.find import Head
from hot_compile.passes.head.operands import NotUnderstood, numel, shape_of
from hot_compile.passes.head.sizes import as_arguments, size_of

_KEEPING = VIEWS | CASTS | {aten.neg.default, aten.clone.default}
_PLACING = {aten.select_scatter.default, aten.slice_scatter.default}
_STATISTICS = {"exp", "linear", "picked", "total"}


class ScalarTangent:
    """The one tangent that a head's coefficients are proportional to.

    Raises:
        NotUnderstood: there is none; the message says why.
    """

    def __init__(self, head: Head) -> None:
        graph = head.product.graph
        self._dependent = made_of_tangents(graph)
        self._results = head.reading.results
        measured = (n for n, e in self._results.items() if _reads_statistics(e))
        self._after_loss = closure(measured)
        self._degrees: dict[fx.Node, int] = {}
        self._found: set[fx.Node] = set()
        if head.coefficients.extra is not None:
            raise NotUnderstood("the caller's gradient of the logits is added")
        for part in (head.coefficients.a, head.coefficients.b, head.coefficients.c):
            if part.constant != 0 and self._degree(part) != 1:
                raise NotUnderstood("a gradient that does not depend on the loss's")
        if len(self._found) != 1:
            raise NotUnderstood("several losses have gradients of their own")
        (self.node,) = self._found

    def _degree(self, expr: Expr) -> int:
        if expr.op in ("const", "take", "column_sum"):
            return 0
        if expr.op == "rows":
            return self._degree_of(expr.args[0])
        if expr.op == "widen":
            return self._degree(expr.args[0])
        inside = [e for e in expr.args if isinstance(e, Expr)]
        degrees = {self._degree(e) for e in inside if e.constant != 0}
        if expr.op == "mul":
            total = sum(self._degree(e) for e in inside)
        elif expr.op in ("add", "where") and len(degrees) == 1:
            total = degrees.pop()
        elif expr.op in _STATISTICS:
            raise NotUnderstood("the size of the gradient depends on the logits, as in a z-loss")
        else:
            total = 2 if degrees != {0} else 0
        return self._checked(total)

    def _degree_of(self, node: fx.Node) -> int:
        if node not in self._degrees:
            self._degrees[node] = self._checked(self._node_degree(node))
        return self._degrees[node]

    def _node_degree(self, node: fx.Node) -> int:
        if node not in self._dependent:
            if node in self._after_loss:
                raise NotUnderstood("the size of the gradient depends on the logits")
            return 0
        if is_tangent(node):
            if numel(node) != 1 or shape_of(node):
                raise NotUnderstood("every row has a gradient of its own (reduction='none')")
            self._found.add(node)
            return 1
        if node in self._results:
            return self._degree(self._results[node])
        parts = [self._degree_of(n) for n in node.all_input_nodes]
        if node.target in _KEEPING:
            return max(parts)
        if node.target in (aten.mul.Tensor, aten.mul.Scalar):
            return sum(self._degree_of(n) for n in node.args if isinstance(n, fx.Node))
        if node.target in (aten.div.Tensor, aten.div.Scalar) and not node.kwargs:
            over = node.args[1]
            below = self._degree_of(over) if isinstance(over, fx.Node) else 0
            return max(parts) if not below else 2
        if node.target in _PLACING:
            base, source = node.args[:2]
            return self._degree_of(source) if _is_zero(base) else 2  # type: ignore[arg-type]
        if node.target is aten.where.self:
            parts = [self._degree_of(n) for n in node.args[1:] if not _is_zero(n)]  # type: ignore[arg-type]
            return parts[0] if len(set(parts)) == 1 else 2
        return 2

    @staticmethod
    def _checked(degree: int) -> int:
        if degree > 1:
            raise NotUnderstood("the loss's gradient is not only multiplied by a number per row")
        return degree

    def units(self, emit: Emitter) -> Units:
        """Emits what depends on the tangent anew, with 1 in its place."""
        return Units(emit, self._dependent, self._results)


class Units:
    """Nodes as they are with the tangent at 1; called with a node, as a ``Leaf``."""

    def __init__(
        self, emit: Emitter, dependent: set[fx.Node], results: dict[fx.Node, Expr]
    ) -> None:
        self._emit, self._dependent, self._results = emit, dependent, results
        self._made: dict[fx.Node, fx.Node] = {}

    def __call__(self, node: fx.Node) -> fx.Node:
        """``node``, or what it would be."""
        if node not in self._dependent:
            return node
        if node not in self._made:
            self._made[node] = self._make(node)
        return self._made[node]

    def _make(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if is_tangent(node):
            device, dtype = value.device, value.dtype
            return self._emit(aten.full.default, [], 1, dtype=dtype, device=device)
        if node in self._results:
            return as_result(
                self._emit, RowWriter(self._emit, None, self), node, self._results[node]
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), self)
        return self._emit(node.target, *args, **kwargs)


def as_result(
    emit: Emitter, write: RowWriter, node: fx.Node, expr: Expr, window: Any = ()
) -> fx.Node:
    """What replaces ``node``, a quantity per row that ``expr`` gives: of its shape and dtype."""
    value = node.meta["val"]
    found = write(expr, window)
    if not isinstance(found, fx.Node):
        found = emit(aten.full.default, [1], found, dtype=torch.float32, device=value.device)
    sizes = as_arguments(emit, map(size_of, value.shape))
    if numel(found) != numel(node):
        found = emit(aten.reshape.default, found, [1] * len(sizes))
        return emit.cast(emit(aten.expand.default, found, sizes), value.dtype)
    return emit.cast(emit(aten.reshape.default, found, sizes), value.dtype)


def _reads_statistics(expr: Expr) -> bool:
    inside = any(isinstance(e, Expr) and _reads_statistics(e) for e in expr.args)
    return expr.op in _STATISTICS or inside


def _is_zero(node: Any) -> bool:
    zero = (aten.full.default, aten.scalar_tensor.default)
    if isinstance(node, fx.Node) and node.target in zero:
        return bool(node.args[-1 if node.target is zero[0] else 0] == 0)
    return not isinstance(node, fx.Node) and bool(node == 0)
