"""Joint graph -> the same with sums of a few rows written out.

Each token adds up what its experts made of it, and every key head the gradients of the queries that
share it. Inductor writes out sums of fewer than eight terms; from there on its kernel reduces in
tiles of 8 wide and slow loads: 1.7 ms for 8 rows of each of 32512 x 2048 (H200, bf16), where the
bytes take 0.25. The terms are added in fp32 in the order in which they lie.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter, ForwardEmitter
from hot_compile.passes.base.graph import aten, strip, value_of
from hot_compile.passes.base.operators import CASTS, RESHAPES, VIEWS, is_pointwise
from hot_compile.passes.base.site import elements_of

_TERMS = range(8, 17)
"""Fewer are written out as they are; of more the code grows long."""
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_ADDED_IN = {None, torch.float32}
"""What a sum may ask for, as CUDA's autocast does: it is added in fp32 anyway."""
_LEAST = 2**20
"""Elements: of fewer nothing is won."""
_MOST_STEPS = 8
"""Between what lies in memory and the rows that are added up."""


def applies(total: fx.Node) -> bool:
    """A sum over one dimension of a few, not the last, of what lies in memory or is gathered."""
    x: Any = total.args[0]
    dim = _dimension(total)
    if dim is None or elements_of(value_of(x)) < _LEAST:
        return False
    return _gathered(x, dim) is not None or not is_pointwise(strip(x, VIEWS | CASTS))


def replace(graph: fx.Graph, total: fx.Node) -> bool:
    """Write the sum out."""
    x: Any = total.args[0]
    emit, dim = ForwardEmitter(graph, total, total), _dimension(total)
    if dim is None:
        return False
    gather, count = _gathered(x, dim), int(value_of(x).shape[dim])
    if gather is not None:
        args: Any = gather.args
        rows, (order,) = args
        terms = _gathered_apart(emit, rows, order, count)
    else:
        terms = [emit(aten.select.int, x, dim, n) for n in range(count)]
    new = _sum(emit, terms, value_of(total).dtype)
    keeps = value_of(total).dim() == value_of(x).dim()
    emit.put_in_place(emit(aten.unsqueeze.default, new, dim) if keeps else new)
    return True


def added(emit: Emitter, rows: fx.Node, order: fx.Node, count: int) -> fx.Node:
    """The sums of ``count`` each of ``rows`` [n, ...] in this ``order`` [m * count]: [m, ...]."""
    if count not in _TERMS:
        taken = emit(aten.index.Tensor, rows, [order])
        shape = [-1, count, *value_of(rows).shape[1:]]
        return emit(aten.sum.dim_IntList, emit(aten.reshape.default, taken, shape), [1])
    return _sum(emit, _gathered_apart(emit, rows, order, count), value_of(rows).dtype)


def _gathered_apart(emit: Emitter, rows: fx.Node, order: fx.Node, count: int) -> list[fx.Node]:
    places = emit(aten.reshape.default, order, [-1, count])
    columns = [emit(aten.select.int, places, 1, n) for n in range(count)]
    return [_taken(emit, rows, column, _MOST_STEPS, {}) for column in columns]


def _sum(emit: Emitter, terms: list[fx.Node], dtype: torch.dtype) -> fx.Node:
    wide = [emit.cast(term, torch.float32) for term in terms]
    return emit.cast(reduce(lambda a, b: emit(aten.add.Tensor, a, b), wide), dtype)


def _dimension(total: fx.Node) -> int | None:
    """The one that is summed over, if its terms are a few and lie apart, and sizes are known."""
    args: Any = total.args
    value, dims = value_of(args[0]), args[1]
    known = value.dim() > 1 and all(isinstance(size, int) for size in value.shape)
    if not known or total.kwargs.get("dtype") not in _ADDED_IN or len(dims or ()) != 1:
        return None
    dim = dims[0] % value.dim()
    few = dim < value.dim() - 1 and value.shape[dim] in _TERMS
    return dim if few and value.dtype in _FLOATS else None


def _gathered(x: Any, dim: int) -> fx.Node | None:
    """The gather of rows that ``x`` is a view of, ``dim`` telling those apart that are added."""
    gather = strip(x, RESHAPES | CASTS)
    if gather.target is not aten.index.Tensor or len(gather.args[1]) != 1 or dim != 1:  # type: ignore[arg-type]
        return None
    order = value_of(gather.args[1][0])  # type: ignore[index]
    rows, *rest = value_of(gather).shape
    first, count, *others = value_of(x).shape
    alike = order.dim() == 1 and not order.dtype.is_floating_point and rest == others
    return gather if alike and order.dtype is not torch.bool and first * count == rows else None


def _taken(
    emit: Emitter, rows: fx.Node, column: fx.Node, steps: int, known: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Some of ``rows``, made of the same rows of what these are made of.

    So that every term is worked out where it is added: what several read Inductor may write first.
    ``known``: what was taken already.
    """
    if rows not in known:
        plain = is_pointwise(rows) or rows.target in CASTS
        operands = rows.all_input_nodes
        if steps and plain and all(_has_rows(node, rows) or _is_number(node) for node in operands):

            def of(node: fx.Node) -> fx.Node:
                number = _is_number(node)
                return node if number else _taken(emit, node, column, steps - 1, known)

            args = fx.node.map_arg(rows.args, of)
            known[rows] = emit(rows.target, *args, **rows.kwargs)  # type: ignore[misc]
        else:
            known[rows] = emit(aten.index.Tensor, rows, [column])
    return known[rows]


def _has_rows(node: fx.Node, like: fx.Node) -> bool:
    value, other = value_of(node), value_of(like)
    return value.dim() == other.dim() and value.shape[0] == other.shape[0]


def _is_number(node: fx.Node) -> bool:
    return value_of(node).dim() == 0
