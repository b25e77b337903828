"""A head that is one softmax (``softmax.py``) -> its own operators."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, through_views, untranspose
from hot_compile.passes.base.operators import CASTS
from hot_compile.passes.head.chunks import Chunks, Swap, Writer, as_swaps
from hot_compile.passes.head.facts import Reader
from hot_compile.passes.head.operands import numel
from hot_compile.passes.head.softmax import Softmax
from hot_compile.runtime.head import parts as head_parts

hot = torch.ops.hot
_KINDS = ("rows", "total", "columns")


def write_softmax(chunks: Chunks, softmax: Softmax, in_forward: bool, int8: bool) -> list[Swap]:
    """(node, what takes its place) for all of ``chunks.results``.

    ``int8``: the gradients' products are on integers.
    """
    return _Fused(chunks, softmax, int8).swaps(in_forward)


class Rows:
    """Numbers per row of a body, as nodes [L, 1] (or [1, 1], or plain numbers) of the graph."""

    def __init__(
        self, chunks: Chunks, softmax: Softmax, emit: Emitter, known: Callable[[fx.Node], fx.Node]
    ) -> None:
        self.emit, self._softmax, self._writer = emit, softmax, Writer(chunks, emit, known)
        self._made: dict[fx.Node, fx.Node] = {}
        self.statistics: fx.Node | None = None
        """[4, L], where there are any yet."""

    def __call__(self, value: Any) -> Any:
        """What a node of the body is here."""
        if not isinstance(value, fx.Node):
            return value
        if value not in self._made:
            self._made[value] = self._make(value)
        return self._made[value]

    def _make(self, value: fx.Node) -> fx.Node:
        if value in self._softmax.statistics:
            assert self.statistics is not None
            place = self._softmax.statistics[value]
            picked = self.emit(aten.select.int, self.statistics, 0, place)
            return self.emit(aten.unsqueeze.default, picked, 1)
        if "leaf" in value.meta:
            return self._writer.row(value.meta["leaf"])
        args, kwargs = fx.map_arg((value.args, value.kwargs), self)
        return self.emit(value.target, *args, **kwargs)

    def vector(
        self, value: Any, like: fx.Node, dtype: torch.dtype | None = torch.float32
    ) -> fx.Node:
        """``value`` as [L], L being the rows of ``like``."""
        node, rows = self(value), self.emit.size(like, 0)
        if not isinstance(node, fx.Node):
            device = like.meta["val"].device
            return self.emit(aten.full.default, [rows], node, dtype=dtype, device=device)
        single = numel(node) == 1
        node = self.emit(aten.reshape.default, node, [-1])
        node = self.emit(aten.expand.default, node, [rows]) if single else node
        return node if dtype is None else self.emit.cast(node, dtype)


class _Fused:
    """The operators of one head."""

    def __init__(self, chunks: Chunks, softmax: Softmax, int8: bool) -> None:
        self._chunks, self._softmax = chunks, softmax
        graph, (product,) = chunks.at.products[0].graph, chunks.at.products
        self._missing = _missing(product, {product, *chunks.results})
        width = product.meta["val"].shape[1]
        self._width = (width,) if self._missing else ()
        self._told = (int8, *self._width) if int8 or self._width else ()
        self._later = [n for n in chunks.results if n in chunks.backward]
        self._forward = Emitter(graph, graph.output_node(), product)
        self._backward = Emitter(graph, graph.output_node(), self._later[0])
        self._product = product

    def swaps(self, in_forward: bool) -> list[Swap]:
        """(node, what takes its place)."""
        known = Rows(self._chunks, self._softmax, self._forward, lambda node: node)
        make = self._in_forward if in_forward else self._in_backward
        known.statistics, logits, gradients = make()
        parts = dict(zip(_KINDS, gradients, strict=True))
        made = {}
        for node, result in self._chunks.results.items():
            if isinstance(result, Reader):
                made[node] = parts[result.kind]
            elif node in self._softmax.rows:
                number = known.vector(self._softmax.rows[node], self._x)
                made[node] = self._forward(aten.unsqueeze.default, number, 1)
            else:
                made[node] = logits
        return as_swaps(self._chunks, made, self._forward, self._backward)

    def _in_forward(self) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
        tangent = self._chunks.tangent()
        assert tangent is not None
        emit = self._forward
        rows = Rows(self._chunks, self._softmax, emit, tangent.units(emit))
        coefficients = self._coefficients(rows)
        op, told = hot.head_both.default, (*self._form, self._dtype, self._wanted, *self._told)
        made = emit(op, *self._given(rows), coefficients, *told)
        parts = emit.parts(made)
        scaled = [self._backward(aten.mul.Tensor, part, tangent.node) for part in parts[2:]]
        return parts[0], parts[1], scaled

    def _in_backward(self) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
        rows = Rows(self._chunks, self._softmax, self._forward, lambda node: node)
        given = self._given(rows)
        told = (*self._form, self._dtype, *self._width)
        first = self._forward(hot.head_statistics.default, *given, *told)
        statistics, logits = self._forward.parts(first)
        emit = self._backward
        rows = Rows(self._chunks, self._softmax, emit, lambda node: node)
        rows.statistics = statistics
        coefficients = self._coefficients(rows)
        given = self._given(rows)
        op, told = hot.head_gradients.default, (*self._form, self._wanted, *self._told)
        made = emit(op, *given, coefficients, None, 1.0, *told)
        return statistics, logits, list(emit.parts(made))

    @property
    def _x(self) -> fx.Node:
        return self._product.args[-2]  # type: ignore[return-value]

    @property
    def _form(self) -> tuple[float, bool, float]:
        assert self._softmax.form is not None
        return self._softmax.form

    @property
    def _wanted(self) -> list[bool]:
        kinds = {r.kind for r in self._chunks.results.values() if isinstance(r, Reader)}
        return [kind in kinds for kind in _KINDS]

    @property
    def _dtype(self) -> torch.dtype | None:
        returned = self._chunks.at.returned
        return returned[0].meta["val"].dtype if returned else None

    def _given(self, rows: Rows) -> tuple[fx.Node | None, ...]:
        """x, weight [O, I], bias, target, and no column."""
        softmax, emit = self._softmax, rows.emit
        x, weight, bias = Writer(self._chunks, emit).product(self._product)
        if softmax.bias is not None:
            bias = emit(aten.reshape.default, rows(softmax.bias), [-1])
        bias = bias and emit.cast(bias, self._product.meta["val"].dtype)
        if self._missing:
            pad = aten.constant_pad_nd.default
            weight = emit(pad, weight, [0, 0, 0, self._missing])
            bias = bias and emit(pad, bias, [0, self._missing])
        target = softmax.index and rows.vector(softmax.index, x, None)
        return x, weight, bias, target, None

    def _coefficients(self, rows: Rows) -> fx.Node:
        vectors = [rows.vector(part, self._x) for part in self._softmax.coefficients]
        emit = rows.emit
        return emit(aten.cat.default, [emit(aten.unsqueeze.default, v, 0) for v in vectors])


def _missing(product: fx.Node, head: Set[fx.Node]) -> int:
    """Outputs of zeros that W gets where the graph casts it, for ``head`` alone: the kernel that
    casts it writes them, so that the operators multiply by W as one part, without a copy."""
    base, transposed = untranspose(product.args[-1])  # type: ignore[arg-type]
    if not transposed or base.target not in CASTS or set(through_views(base)) - head:
        return 0
    return head_parts.missing_outputs(base.meta["val"])
