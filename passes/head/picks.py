"""Rows picked out of logits -> logits of the rows picked: ``(x W^T)[rows]`` is ``x[rows] W^T``.

Picking goes ahead of all that works row by row, up to the product. In the backward, what puts a
gradient of such rows among zeros goes behind all that is linear, up to the products that read it.
The graph changes only if that leaves no reader of all the logits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, closure, made_of_tangents, untranspose, walk
from hot_compile.passes.base.operators import CASTS, is_pointwise
from hot_compile.passes.head.facts import is_product, sizes
from hot_compile.passes.head.find import candidates
from hot_compile.passes.head.operands import (
    FLAT,
    NotUnderstood,
    Shape,
    args_of,
    count,
    is_one,
    is_random,
    is_tensor,
    is_zero,
    numel,
    rank_of,
    same_size,
    shape_of,
)
from hot_compile.passes.head.rules import REDUCTIONS
from hot_compile.passes.head.sizes import as_arguments

_PUTS: dict[Any, tuple[Any, int]] = {
    aten.index_put.default: (aten.index.Tensor, 2),
    aten.slice_scatter.default: (aten.slice.Tensor, 1),
}
"""The opposite of a pick, and where what it puts is among its arguments."""
_PICKS = {pick for pick, _ in _PUTS.values()}
_LINEAR: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.where.self: (1, 2),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar), (0,)),
    **dict.fromkeys((aten.neg.default, *CASTS), (0,)),
}
"""Linear in these operands together."""
Terms = dict[fx.Node, fx.Node]
"""Numbers of rows [n] -> what is added there [n, columns]; all else is zero."""


def pick_rows_first(graph: fx.Graph, least: int) -> None:
    """Have rows picked before a head's product of ``least`` bytes, where nothing reads others."""
    for product in list(candidates(graph, made_of_tangents(graph), least)):
        gradients, behind = made_of_tangents(graph), closure([product])
        every = [n for n in graph.nodes if n not in gradients and _picks_rows(n, product)]
        picks = [n for n in every if n in behind]
        if picks and product.users and sum(map(numel, picks)) <= numel(product):
            keys = set(map(_key, picks))
            _Rows(graph, product).replace({n for n in every if _key(n) in keys})


def _picks_rows(node: fx.Node, product: fx.Node) -> bool:
    """Others than one after the other, as a window has them; how many is known before."""
    if node.target is aten.index.Tensor:
        dtypes = [index.meta["val"].dtype for index in args_of(node)[1] if index is not None]
        taken = torch.bool not in dtypes
    else:
        taken = node.target is aten.slice.Tensor and len(node.args) > 4
    return taken and _keeps_columns(node, product)


def _keeps_columns(node: fx.Node, product: fx.Node) -> bool:
    """It leaves columns together, as the last dimension: a pick, or what puts rows back."""
    rank, given = rank_of(args_of(node)[0]), _given(node)
    if rank < 2 or not same_size(shape_of(node)[-1], shape_of(product)[1]):
        return False
    if isinstance(given[0], (list, tuple)):
        return len(given[0]) < rank
    return bool(given[0] % rank != rank - 1)


def _given(node: fx.Node) -> tuple[Any, ...]:
    """Which rows a pick takes, or a put writes, as its arguments say."""
    if node.target in (aten.index.Tensor, aten.index_put.default):
        return args_of(node)[1:2]
    return args_of(node)[2 if node.target in _PUTS else 1 :] or (0,)


def _key(node: fx.Node) -> tuple[Shape, Any, tuple[Any, ...]]:
    """Of which rows a pick takes which; or of what puts those back."""
    pick, _ = _PUTS.get(node.target, (node.target, 0))
    whole = node if node.target in _PUTS else args_of(node)[0]
    return sizes(whole)[:-1], pick, _given(node)


def _is_of_columns(node: fx.Node) -> bool:
    """It reduces the last dimension, and keeps it."""
    if node.target not in REDUCTIONS or len(node.args) < 2:
        return False
    source, dims = args_of(node)[:2]
    last = rank_of(source) - 1
    kept = rank_of(node) == rank_of(source) > 1
    return kept and dims in ([-1], [last], -1, last)


def _is_of_rows(node: fx.Node) -> bool:
    """A view or a copy that leaves the columns together, as the last dimension."""
    if node.target not in FLAT - CASTS or rank_of(args_of(node)[0]) < 2:
        return False
    return same_size(shape_of(args_of(node)[0])[-1], shape_of(node)[-1])


def _as_many(node: fx.Node, operand: fx.Node) -> bool:
    """An operand has each of the rows, rather than some for several."""
    return rank_of(operand) > 1 and count(sizes(operand)[:-1]) == count(sizes(node)[:-1])


def _times(emit: Emitter, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
    return a * b if isinstance(a, int) and isinstance(b, int) else emit(operator.mul, a, b)


class _Rows:
    """A graph in which rows are picked before ``product``."""

    def __init__(self, graph: fx.Graph, product: fx.Node) -> None:
        self._graph, self._product, self._before = graph, product, product
        self._swaps: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[Any, fx.Node] = {}
        self._pulled: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._pushed: dict[fx.Node, Terms] = {}

    def replace(self, picks: set[fx.Node]) -> None:
        """Nothing is, unless the product goes."""
        graph, swaps = self._graph, self._swaps
        try:
            for node in list(graph.nodes):
                self._before = node
                if node in picks:
                    self._pull_before(node)
                else:
                    self._push(node)
        except (NotUnderstood, ValueError):
            swaps.clear()
        ends = [graph.output_node()]
        if self._product not in walk(ends, lambda n: [swaps.get(a, a) for a in n.all_input_nodes]):
            for old, new in swaps.items():
                old.replace_all_uses_with(new)
        graph.eliminate_dead_code()

    def _emit(self, like: fx.Node) -> Emitter:
        return Emitter(self._graph, self._before, like)

    def _again(self, node: fx.Node, known: Callable[[fx.Node], Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known)
        return self._emit(node)(node.target, *args, **kwargs)

    def _flat(self, node: fx.Node) -> fx.Node:
        """[rows, columns]."""
        emit = self._emit(node)
        if rank_of(node) == 2:
            return node
        return emit(aten.reshape.default, node, [-1, *as_arguments(emit, sizes(node)[-1:])])

    # Which rows

    def _rows_of(self, node: fx.Node) -> fx.Node:
        """[n]: which rows of all a pick takes, or a put writes."""
        key = lead, pick, given = _key(node)
        if key not in self._numbers and node.target in _PUTS:
            raise NotUnderstood("other rows are put back than were picked")
        if key not in self._numbers:
            emit = self._emit(node)
            dims = as_arguments(emit, lead)
            length = functools.reduce(lambda a, b: _times(emit, a, b), dims)
            device = self._product.meta["val"].device
            rows = emit.numbers(length, device)
            picked = emit(pick, emit(aten.reshape.default, rows, dims), *given)
            self._numbers[key] = emit(aten.reshape.default, picked, [-1])
        return self._numbers[key]

    def _inside(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """``rows`` of what a pick takes, or a put writes, counted among all."""
        key = self._rows_of(node), rows
        if key not in self._numbers:
            self._numbers[key] = self._emit(node)(aten.index.Tensor, key[0], [rows])
        return self._numbers[key]

    # Forward: picking goes ahead

    def _pull_before(self, pick: fx.Node) -> None:
        emit = self._emit(pick)
        made = self._picked(args_of(pick)[0], self._rows_of(pick))
        if rank_of(pick) != 2:
            made = emit(aten.reshape.default, made, as_arguments(emit, sizes(pick)))
        self._swaps[pick] = made

    def _picked(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """[n, columns]: these rows of ``node`` [..., columns]."""
        if (node, rows) not in self._pulled:
            self._pulled[node, rows] = self._pull(node, rows)
        return self._pulled[node, rows]

    def _pull(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        emit, source = self._emit(node), (*args_of(node), None)[0]
        if is_product(node):
            *bias, x, right = args_of(node)
            return emit(node.target, *bias, self._picked(x, rows), right)
        if _is_of_rows(node):
            return self._picked(source, rows)
        if (is_pointwise(node) and not is_random(node)) or node.target in CASTS:
            return self._again(node, lambda arg: self._beside(arg, node, rows))
        if node.target is aten.expand.default and _as_many(node, source):
            return self._spread(node, self._picked(source, rows))
        if node.target in _PICKS and _keeps_columns(node, self._product):
            return self._picked(source, self._inside(node, rows))
        if _is_of_columns(node):
            over = [1] if isinstance(args_of(node)[1], list) else 1
            picked = self._picked(source, rows)
            return emit(node.target, picked, over, *args_of(node)[2:], **node.kwargs)
        return emit(aten.index.Tensor, self._flat(node), [rows])

    def _beside(self, arg: fx.Node, node: fx.Node, rows: fx.Node) -> fx.Node:
        """An operand of ``node``, elementwise, of these rows."""
        if not is_tensor(arg):
            return arg
        emit, shape, lead = self._emit(arg), sizes(arg), sizes(node)[:-1]
        if not shape or all(map(is_one, shape[:-1])):
            return arg if len(shape) < 3 else self._flat(arg)
        if count(shape[:-1]) != count(lead):  # some for several rows
            arg = emit(aten.expand.default, arg, as_arguments(emit, (*lead, shape[-1])))
        return self._picked(arg, rows)

    # Backward: putting back goes behind

    def _push(self, node: fx.Node) -> None:
        """What is zero but at some rows: what it is there, or what takes the place of its reader.

        Raises:
            NotUnderstood: it is not linear in the gradient.
        """
        pick, place = _PUTS.get(node.target, (None, 0))
        added = node.target is not aten.index_put.default or args_of(node)[3:] == (True,)
        if pick and added and is_zero(args_of(node)[0]) and _keeps_columns(node, self._product):
            value = args_of(node)[place]
            inner = self._pushed.get(value, {})
            self._pushed[node] = {self._inside(node, rows): g for rows, g in inner.items()}
            if not inner:
                self._pushed[node] = {self._rows_of(node): self._flat(value)}
        elif any(n in self._pushed for n in node.all_input_nodes):
            terms = self._linear(node)
            if terms is not None:
                self._pushed[node] = terms
            elif rank_of(node) != 2 or node.target is not aten.permute.default:
                self._read(node)
        elif node.target is aten.mm.default and untranspose(args_of(node)[0])[0] in self._pushed:
            self._read(node)

    def _linear(self, node: fx.Node) -> Terms | None:
        """What an operator makes of each term; None: it is none that is linear, row by row."""
        pushed, first = self._pushed, args_of(node)[0]
        given = [n for n, arg in enumerate(node.args) if arg in pushed]
        together = [n for n in _LINEAR.get(node.target, ()) if not is_zero(args_of(node)[n])]
        alike = all(_as_many(node, args_of(node)[n]) for n in given)
        single = node.target is aten.mul.Tensor and len(given) == 1
        if alike and (given == together or single):
            every = dict.fromkeys(rows for n in given for rows in pushed[args_of(node)[n]])
            term = functools.partial(self._term, node=node)
            return {rows: self._again(node, functools.partial(term, rows=rows)) for rows in every}
        if _is_of_rows(node):
            return pushed[first]
        if node.target is aten.sum.dim_IntList and _is_of_columns(node):
            return {rows: self._sum(node, g, 1) for rows, g in pushed[first].items()}
        if node.target is aten.expand.default and _as_many(node, first):
            return {rows: self._spread(node, g) for rows, g in pushed[first].items()}
        return None

    def _term(self, arg: fx.Node, node: fx.Node, rows: fx.Node) -> Any:
        """An operand of ``node`` as it is at these rows."""
        if arg in self._pushed:
            return self._pushed[arg].get(rows, 0)
        return self._beside(arg, node, rows)

    def _sum(self, node: fx.Node, g: fx.Node, over: int) -> fx.Node:
        return self._emit(node)(node.target, g, [over], *args_of(node)[2:], **node.kwargs)

    def _spread(self, node: fx.Node, one: fx.Node) -> fx.Node:
        """One number a row, for all columns."""
        emit = self._emit(node)
        return emit(aten.expand.default, one, [-1, *as_arguments(emit, sizes(node)[-1:])])

    def _read(self, node: fx.Node) -> None:
        """A product, or a sum over rows, of each term."""
        if node.target is aten.mm.default:
            a, b = args_of(node)
            terms = self._pushed.get(untranspose(a)[0]) or self._pushed[b]
            found = [self._product_of(node, rows, g) for rows, g in terms.items()]
        elif (
            node.target is aten.sum.dim_IntList
            and args_of(node)[1] == [0]
            and rank_of(args_of(node)[0]) == 2
        ):
            terms = self._pushed[args_of(node)[0]]
            found = [self._sum(node, g, 0) for g in terms.values()]
        else:
            raise NotUnderstood("what is zero but at some rows is read as a whole")
        self._swaps[node] = functools.reduce(
            functools.partial(self._emit(node), aten.add.Tensor), found
        )

    def _product_of(self, node: fx.Node, rows: fx.Node, g: fx.Node) -> fx.Node:
        """The gradient of W, or of x [rows, inputs], of one term."""
        emit, (a, b) = self._emit(node), args_of(node)
        base, flipped = untranspose(a)
        if b in self._pushed:
            return emit(node.target, emit.permute(self._picked(base, rows), [1, 0]), g)
        if flipped:
            return emit(node.target, emit.permute(g, [1, 0]), self._picked(b, rows))
        value = node.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        zeros = emit(aten.full.default, as_arguments(emit, sizes(node)), 0, **kind)
        return emit(aten.index_put.default, zeros, [rows], emit(node.target, g, b), True)
