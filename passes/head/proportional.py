"""Whether gradients are one scalar tangent times what the forward already knows.

Then they can be made in the forward, with 1 in the tangent's place, and the backward only
multiplies them by it: three products instead of four.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, is_tangent, made_of_tangents
from hot_compile.passes.base.operators import CASTS, VIEWS
from hot_compile.passes.head.operands import NotUnderstood, args_of, is_fma, is_zero, numel, rank_of

_LINEAR = {
    *VIEWS,
    *CASTS,
    aten.neg.default,
    aten.clone.default,
    aten.sum.dim_IntList,
    aten.sum.default,
    aten.mean.dim,
    aten.gather.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dims,
    operator.getitem,
}
"""Linear in the first operand."""
_SUMS: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.where.self: (1, 2),
    aten.select_scatter.default: (0, 1),
    aten.slice_scatter.default: (0, 1),
    aten.constant_pad_nd.default: (0, 2),
    aten.scatter.src: (0, 3),
    aten.scatter.value: (0, 3),
    aten.scatter_add.default: (0, 3),
    aten.index_put.default: (0, 2),
}
"""Linear in these operands together."""
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.mm.default}


class ScalarTangent:
    """The one tangent that ``gradients`` are proportional to.

    Raises:
        NotUnderstood: there is none; the message says why.
    """

    def __init__(self, graph: fx.Graph, gradients: Iterable[fx.Node]) -> None:
        self._dependent = made_of_tangents(graph)
        self._degrees: dict[fx.Node, int] = {}
        self._found: set[fx.Node] = set()
        if any(self._degree(node) != 1 for node in gradients):
            raise NotUnderstood("a gradient that does not depend on the loss's")
        if len(self._found) != 1:
            raise NotUnderstood("several losses have gradients of their own")
        (self.node,) = self._found

    def _degree(self, node: Any) -> int:
        """In which power the tangent is in ``node``."""
        if not isinstance(node, fx.Node) or node not in self._dependent:
            return 0
        if node not in self._degrees:
            degree = self._of(node)
            if degree > 1:
                raise NotUnderstood(
                    "the loss's gradient is not only multiplied by a number per row"
                )
            self._degrees[node] = degree
        return self._degrees[node]

    def _of(self, node: fx.Node) -> int:
        if is_tangent(node):
            if numel(node) != 1 or rank_of(node):
                raise NotUnderstood("every row has a gradient of its own (reduction='none')")
            self._found.add(node)
            return 1
        if node.target in _LINEAR:
            first, *others = node.all_input_nodes
            return 2 if any(map(self._degree, others)) else self._degree(first)
        if node.target in _PRODUCTS:
            return sum(map(self._degree, node.args))
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            return 2 if self._degree(node.args[1]) else self._degree(node.args[0])
        if is_fma(node):
            a, b, c = args_of(node)
            found = {self._degree(a) + self._degree(b), self._degree(c)}
            return found.pop() if len(found) == 1 else 2
        parts = [args_of(node)[n] for n in _SUMS.get(node.target, ()) if n < len(node.args)]
        if node.target is aten.cat.default:
            parts = list(args_of(node)[0])
        found = {self._degree(part) for part in parts if not is_zero(part)}
        return found.pop() if len(found) == 1 else 2

    def units(self, emit: Emitter) -> Units:
        """Emits what depends on the tangent anew, with 1 in its place."""
        return Units(emit, self._dependent)


class Units:
    """Nodes as they are with the tangent at 1."""

    def __init__(self, emit: Emitter, dependent: set[fx.Node]) -> None:
        self._emit, self._dependent = emit, dependent
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
        args, kwargs = fx.map_arg((node.args, node.kwargs), self)
        return self._emit(node.target, *args, **kwargs)
