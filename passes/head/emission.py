"""``Expr`` -> nodes: numbers per row, flat [rows], in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten
from hot_compile.passes.head.algebra import Cut, Expr, Linear, Window
from hot_compile.passes.head.operands import NotUnderstood, count, numel, shape_of
from hot_compile.passes.head.sizes import as_arguments, minus

Leaf = Callable[[fx.Node], fx.Node]
_STATISTICS = {"max": 0, "lse": 1, "picked": 2, "total": 3}


class RowWriter:
    """Emits expressions.

    Args:
        emit: where the nodes go.
        statistics: [4, L] of all rows; None where no expression may need it.
        leaf: stands in for the nodes that expressions name.
    """

    def __init__(
        self, emit: Emitter, statistics: fx.Node | None, leaf: Leaf = lambda node: node
    ) -> None:
        self.emit, self._statistics, self._leaf = emit, statistics, leaf

    def __call__(self, expr: Expr, window: Window = ()) -> fx.Node | float:
        """[rows of ``window``], or [1], or a plain number where all rows have the same."""
        return getattr(self, f"_{expr.op}")(window, *expr.args)

    def vector(self, expr: Expr, rows: Any, like: fx.Node) -> fx.Node:
        """``expr`` as [rows]; ``like`` lies on its device."""
        value = self(expr)
        if not isinstance(value, fx.Node):
            device = like.meta["val"].device
            return self.emit(aten.full.default, [rows], value, dtype=torch.float32, device=device)
        return self.emit(aten.expand.default, value, [rows]) if _is_single(value) else value

    def flat(self, node: fx.Node, shape: Any = None) -> fx.Node:
        """``node`` as it is broadcast to ``shape``, flattened; [1] if it is one number."""
        node = self._leaf(node)
        if shape is not None and numel(node) not in (1, count(shape)):
            node = self.emit(aten.expand.default, node, as_arguments(self.emit, shape))
        return self.emit(aten.reshape.default, node, [-1])

    def widen(self, value: fx.Node | float, cut: Cut) -> fx.Node | float:
        """``value`` with zeros for the rows that ``cut`` had left out."""
        if not isinstance(value, fx.Node):
            if value == 0:
                return value
            raise NotUnderstood("a number without a device is padded")
        left = as_arguments(self.emit, cut.left)
        if _is_single(value):
            value = self.emit(aten.reshape.default, value, [1] * len(left))
            value = self.emit(aten.expand.default, value, left)
        else:
            value = self.emit(aten.reshape.default, value, left)
        ends = [cut.start, minus(cut.lead[cut.dim], cut.stop)]
        pads = [0] * (2 * (len(left) - cut.dim - 1)) + as_arguments(self.emit, ends)
        value = self.emit(aten.constant_pad_nd.default, value, pads, 0)
        return self.emit(aten.reshape.default, value, [-1])

    def _const(self, window: Window, value: float) -> float:
        return value

    def _rows(self, window: Window, node: fx.Node, shape: Any) -> fx.Node:
        return self.emit.cast(self.flat(node, shape), torch.float32)

    def _mul(self, window: Window, a: Expr, b: Expr) -> fx.Node | float:
        return self._binary(aten.mul.Tensor, self(a, window), self(b, window))

    def _add(self, window: Window, a: Expr, b: Expr) -> fx.Node | float:
        return self._binary(aten.add.Tensor, self(a, window), self(b, window))

    def _binary(self, op: Any, a: fx.Node | float, b: fx.Node | float) -> fx.Node | float:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if isinstance(a, fx.Node):
            return self.emit(op, a, b)
        assert not isinstance(b, fx.Node)
        return a * b if op is aten.mul.Tensor else a + b

    def _inverse(self, window: Window, a: Expr) -> fx.Node | float:
        value = self(a, window)
        if isinstance(value, fx.Node):
            return self.emit(aten.reciprocal.default, value)
        return 1 / value

    def _where(self, window: Window, node: fx.Node, shape: Any, a: Expr, b: Expr) -> fx.Node:
        condition = self.flat(node, shape)
        return self.emit(
            aten.where.self,
            condition,
            self._tensor(self(a, window), condition),
            self._tensor(self(b, window), condition),
        )

    def _tensor(self, value: fx.Node | float, like: fx.Node) -> fx.Node:
        if isinstance(value, fx.Node):
            return value
        device = like.meta["val"].device
        return self.emit(aten.full.default, [1], value, dtype=torch.float32, device=device)

    def _exp(self, window: Window, exponent: Linear) -> fx.Node:
        return self.emit(aten.exp.default, self._linear(window, exponent))

    def _linear(self, window: Window, parts: Linear) -> fx.Node | float:
        total: fx.Node | float = 0.0
        for quantity, factor in parts.parts:
            known = isinstance(quantity, str)
            value = self._statistic(quantity, window) if known else self(quantity, window)
            value = value if factor == 1 else self._binary(aten.mul.Tensor, value, factor)
            total = value if total == 0.0 else self._binary(aten.add.Tensor, total, value)
        return total

    def _picked(self, window: Window, index: Any) -> fx.Node:
        return self._statistic("picked", window)

    def _total(self, window: Window) -> fx.Node:
        return self._statistic("total", window)

    def _statistic(self, name: str, window: Window) -> fx.Node:
        if self._statistics is None:
            raise NotUnderstood("the gradient's size depends on the loss itself")
        value = self.emit(aten.select.int, self._statistics, 0, _STATISTICS[name])
        for cut in window:
            lead, ends = (as_arguments(self.emit, s) for s in (cut.lead, (cut.start, cut.stop)))
            value = self.emit(aten.reshape.default, value, lead)
            value = self.emit(aten.slice.Tensor, value, cut.dim, *ends)
            value = self.emit(aten.reshape.default, value, [-1])
        return value

    def _take(self, window: Window, column: fx.Node, index: Any) -> fx.Node:
        picked = self.flat(index.node, index.shape)
        value = self.emit(aten.index.Tensor, self._column(column), [picked])
        return self.emit.cast(value, torch.float32)

    def _column_sum(self, window: Window, column: fx.Node) -> fx.Node:
        value = self.emit.cast(self._column(column), torch.float32)
        return self.emit(aten.sum.dim_IntList, value, [0], True)

    def _column(self, column: fx.Node) -> fx.Node:
        return self.emit(aten.reshape.default, column, [-1])

    def _widen(self, window: Window, inside: Expr, cut: Cut) -> fx.Node | float:
        return self.widen(self(inside, (*window, cut)), cut)


def _is_single(node: fx.Node) -> bool:
    (size,) = shape_of(node)
    return isinstance(size, int) and size == 1
