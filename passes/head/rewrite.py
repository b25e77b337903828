"""Heads that the plan takes -> operators that go through them in chunks. Never chooses."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hot_compile.config import HotConfig, Strategy
from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, settle
from hot_compile.passes.cost.linear import Pricing
from hot_compile.passes.head.chunks import write_chunks
from hot_compile.passes.head.emission import RowWriter
from hot_compile.passes.head.find import Head, Refused, Rows, find_heads
from hot_compile.passes.head.linear import ScalarTangent, as_result
from hot_compile.passes.head.operands import rank_of
from hot_compile.passes.head.plan import BACKWARD, FORWARD, OFF, HeadDecision, plan_head
from hot_compile.passes.head.quantised import EXACT
from hot_compile.passes.head.sizes import as_arguments, size_of

log = logging.getLogger("hot_compile")
hot = torch.ops.hot


def chunk_heads(
    graph: fx.Graph, config: HotConfig, pricing: Pricing, observed: bool = False
) -> tuple[HeadDecision, ...]:
    """Replace every head that pays by its operators; says what became of each that is large.

    A head whose rewriting fails stays as it is, with a warning.

    Args:
        graph: a joint graph, changed in place.
        config: the user's options.
        pricing: of the heads' devices; asked only where a strategy is to work there.
        observed: all is to be exact, whatever strategies the options name.
    """
    decisions = []
    for found in find_heads(graph, config.head_min_bytes):
        decision = plan_head(found, config, pricing)
        if observed:
            decision = dataclasses.replace(decision, by=EXACT)
        if (
            decision.chunked
            and not isinstance(found, Refused)
            and not _replace(graph, found, decision)
        ):
            decision = dataclasses.replace(decision, way=OFF, reason="its rewriting failed")
        decisions.append(decision)
    return tuple(decisions)


def _replace(graph: fx.Graph, head: Head | Rows, decision: HeadDecision) -> bool:
    """Whether the head's operators took its place."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    try:
        if isinstance(head, Rows):
            swaps = write_chunks(head.chunks, decision.way == FORWARD)
        else:
            swaps = _Rewrite(graph, head, decision).swaps()
    except Exception:  # what was built so far is used by nobody
        log.warning("hot: the head %s stays as it is", head.name, exc_info=True)
        graph.eliminate_dead_code()
        return False
    for old, new in swaps:
        old.replace_all_uses_with(new)
    settle(graph, places)
    graph.eliminate_dead_code()
    graph.lint()
    return True


class _Rewrite:
    """One head's new nodes."""

    def __init__(self, graph: fx.Graph, head: Head, decision: HeadDecision) -> None:
        self._graph, self._head, self._decision = graph, head, decision
        self._forward = Emitter(graph, graph.output_node(), head.product)
        self._backward = Emitter(graph, graph.output_node(), self._first_reader())

    def swaps(self) -> list[tuple[fx.Node, fx.Node]]:
        """(node, what takes its place): of the loss's row quantities, gradients and logits."""
        make = {FORWARD: self._in_forward, BACKWARD: self._in_backward}[self._decision.way]
        statistics, logits, gradients = make()
        swaps = [(node, self._result(node, statistics)) for node in self._head.reading.results]
        for node in self._head.returned:
            sizes = as_arguments(self._forward, map(size_of, node.meta["val"].shape))
            swaps.append((node, self._forward(aten.reshape.default, logits, sizes)))
        for node in self._head.reading.sizes:
            (size,) = as_arguments(self._forward, [size_of(node)])
            assert isinstance(size, fx.Node)
            swaps.append((node, size))
        return swaps + gradients

    def _first_reader(self) -> fx.Node:
        return next(iter(self._head.reading.readers))

    def _in_forward(self) -> tuple[fx.Node, fx.Node, list[tuple[fx.Node, fx.Node]]]:
        tangent = ScalarTangent(self._head)
        write = RowWriter(self._forward, None, tangent.units(self._forward))
        op, told = self._operator(hot.head_both, hot.head_both_by)
        made = self._forward(
            op,
            *self._given(self._forward),
            self._coefficients(write),
            *self._form,
            self._logits_dtype,
            self._wanted,
            *told,
        )
        parts = [self._forward(operator.getitem, made, n) for n in range(5)]
        scaled = [self._backward(aten.mul.Tensor, part, tangent.node) for part in parts[2:]]
        return parts[0], parts[1], self._gradients(scaled)

    def _in_backward(self) -> tuple[fx.Node, fx.Node, list[tuple[fx.Node, fx.Node]]]:
        head = self._head
        first = self._forward(
            hot.head_statistics.default,
            *self._given(self._forward),
            *self._form,
            self._logits_dtype,
        )
        statistics, logits = (self._forward(operator.getitem, first, n) for n in range(2))
        emit = self._backward
        write = RowWriter(emit, statistics)
        extra = head.coefficients.extra
        if extra is not None:
            extra = emit(aten.reshape.default, extra, [-1, head.value.shape[1]])
        op, told = self._operator(hot.head_gradients, hot.head_gradients_by)
        made = emit(
            op,
            *self._given(emit),
            self._coefficients(write),
            extra,
            head.coefficients.extra_scale,
            *self._form,
            self._wanted,
            *told,
        )
        parts = [emit(operator.getitem, made, n) for n in range(3)]
        return statistics, logits, self._gradients(parts)

    def _operator(self, exact: Any, by: Any) -> tuple[Any, tuple[Any, ...]]:
        """(operator, its last arguments) for the products of the gradients."""
        if self._decision.strategy is Strategy.EXACT:
            return exact.default, ()
        return by.default, self._decision.by

    @property
    def _form(self) -> tuple[float, bool, float]:
        assert self._head.reading.form is not None
        return self._head.reading.form

    @property
    def _wanted(self) -> list[bool]:
        head = self._head
        return [bool(head.grad_inputs), bool(head.grad_weights), bool(head.grad_biases)]

    @property
    def _logits_dtype(self) -> torch.dtype | None:
        returned = self._head.returned
        return returned[0].meta["val"].dtype if returned else None

    def _given(self, emit: Emitter) -> tuple[fx.Node | None, ...]:
        """x, weight [O, I], bias, target, column."""
        head, reading = self._head, self._head.reading
        weight = emit.permute(head.weight, [1, 0]) if head.weight_is_io else head.weight
        column = reading.column
        if column is not None:
            column = emit.cast(emit(aten.reshape.default, column, [-1]), torch.float32)
        write, target = RowWriter(emit, None), None
        for index, window in reading.picks:
            part: Any = write.flat(index.node, index.shape)
            for cut in reversed(window):
                part = write.widen(part, cut)
            target = part if target is None else emit(aten.add.Tensor, target, part)
        bias = head.bias
        if bias is not None and rank_of(bias) != 1:
            bias = emit(aten.reshape.default, bias, [-1])
        bias = bias and emit.cast(bias, head.value.dtype)
        return head.x, weight, bias, target, column

    def _coefficients(self, write: RowWriter) -> fx.Node:
        emit, head = write.emit, self._head
        rows = emit.size(head.x, 0)
        parts = (head.coefficients.a, head.coefficients.b, head.coefficients.c)
        vectors = [write.vector(part, rows, head.x) for part in parts]
        return emit(aten.cat.default, [emit(aten.unsqueeze.default, v, 0) for v in vectors])

    def _result(self, node: fx.Node, statistics: fx.Node) -> fx.Node:
        reading = self._head.reading
        emit = Emitter(self._graph, self._graph.output_node(), node)
        window = reading.windows[node]
        return as_result(emit, RowWriter(emit, statistics), node, reading.results[node], window)

    def _gradients(self, parts: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        head, emit = self._head, self._backward
        readers = zip(parts, (head.grad_inputs, head.grad_weights, head.grad_biases), strict=True)
        return [(node, self._like(emit, part, node)) for part, nodes in readers for node in nodes]

    def _like(self, emit: Emitter, part: fx.Node, node: fx.Node) -> fx.Node:
        """``part`` in the dtype and layout of the reader it replaces."""
        want = node.meta["val"]
        part = emit.cast(part, want.dtype)
        if node in self._head.grad_biases:
            return emit(aten.reshape.default, part, list(want.shape))
        first = node.args[0]
        is_io = node in self._head.grad_weights and first not in self._head.reading.wide
        return emit.permute(part, [1, 0]) if is_io else part
