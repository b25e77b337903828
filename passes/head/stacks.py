"""Logits stacked in a new dimension -> each on its own: ``stack([a, b]).exp()[0]`` is ``a.exp()``.

What works along the new dimension works on its parts: a sum of them is an addition.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, closure, made_of_tangents
from hot_compile.passes.base.operators import CASTS, RESHAPES, is_pointwise
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.head.facts import sizes
from hot_compile.passes.head.find import candidates
from hot_compile.passes.head.operands import (
    FLAT,
    NotUnderstood,
    Shape,
    args_of,
    is_one,
    is_random,
    is_tensor,
    rank_of,
    shape_of,
    without,
)
from hot_compile.passes.head.rules import moved
from hot_compile.passes.head.sizes import as_arguments

_TOGETHER: dict[Any, Any] = {
    aten.sum.default: aten.add.Tensor,
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.mean.default: aten.add.Tensor,
    aten.mean.dim: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
}
"""What of two parts is the same of both stacked."""
_BY_DIM = {op: op for op in _TOGETHER} | {
    aten.sum.default: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
}
_MEANS = {aten.mean.default, aten.mean.dim}
Parts = tuple[int, list[fx.Node]]
"""Along which dimension, and what lies there; one for all if they are alike, or if there is one."""


def unstack(graph: fx.Graph, least: int) -> None:
    """Have stacks of what is made of heads, ``least`` bytes or more, read part by part."""
    behind = closure(candidates(graph, made_of_tangents(graph), least))
    stacks = [n for n in graph.nodes if n in behind and _stacked(n)]
    stacks = [n for n in stacks if bytes_of(n.meta["val"]) >= least]
    if stacks:
        parts = _Stacks(graph, stacks)
        for node in list(graph.nodes):
            parts.visit(node)
        graph.eliminate_dead_code()


def _stacked(node: fx.Node) -> Parts | None:
    """The parts of a stack, as tensors without its dimension."""
    cat = args_of(node)[0] if node.target in RESHAPES else node
    if getattr(cat, "target", None) is not aten.cat.default:
        return None
    pieces, dim = (*args_of(cat), 0)[:2]
    dim %= rank_of(cat)
    shape = sizes(pieces[0])
    if cat is not node:
        fits = sizes(node) == (*shape[:dim], len(pieces), *shape[dim:])
        return (dim, list(pieces)) if fits and all(sizes(p) == shape for p in pieces) else None
    news = [p for p in pieces if p.target is aten.unsqueeze.default and is_one(sizes(p)[dim])]
    sources = [args_of(p)[0] for p in news]
    fits = all(sizes(s) == without(shape, dim, drop=True) for s in sources)
    return (dim, sources) if fits and len(sources) == len(pieces) else None


def _is_by_element(node: fx.Node) -> bool:
    return node.target in CASTS or (is_pointwise(node) and not is_random(node))


class _Stacks:
    """What is made of ``stacks``, and each part of it."""

    def __init__(self, graph: fx.Graph, stacks: list[fx.Node]) -> None:
        self._graph = graph
        self._parts: dict[fx.Node, Parts] = {}
        self._dims: dict[Shape, int] = {}
        for node in stacks:
            self._note(node, *(_stacked(node) or ()))

    def _note(self, node: fx.Node, dim: int, parts: list[fx.Node]) -> None:
        self._parts[node] = dim, parts
        self._dims[sizes(node)] = dim

    def visit(self, node: fx.Node) -> None:
        """Note the parts of a node, or have a part, or what is made of all, take its place."""
        source = next((n for n in node.all_input_nodes if n in self._parts), None)
        emit = Emitter(self._graph, node, node)
        if node in self._parts or node.op == "output":
            return
        if node.target is aten.expand.default:
            dim = self._dims.get(sizes(node)) if source is None else self._dim(node, source)
            if dim is not None:
                self._expand(emit, node, dim)
        elif source is not None and _is_by_element(node):
            self._pointwise(emit, node, self._dim(node, source))
        elif source is not None and node.target in _TOGETHER and not node.kwargs:
            self._reduce(emit, node, source)
        elif source is not None and node.target in FLAT | {aten.select.int}:
            self._view(emit, node, source)
        elif node.target is aten.select_scatter.default and sizes(node) in self._dims:
            self._put(emit, node, self._dims[sizes(node)])
        elif node.target is operator.getitem and args_of(node)[0].target is aten.unbind.int:
            split, number = args_of(node)
            self._take(node, args_of(split)[0], (*args_of(split), 0)[1], number)

    def _dim(self, node: fx.Node, source: fx.Node) -> int:
        """Where the new dimension of an operand is in what is broadcast."""
        return self._parts[source][0] + rank_of(node) - rank_of(source)

    def _at(self, emit: Emitter, arg: fx.Node, rank: int, dim: int, number: int) -> fx.Node:
        """An operand of something of this rank, as it is for one part."""
        if not is_tensor(arg):
            return arg
        own = dim - rank + rank_of(arg)
        if arg in self._parts:
            parts = self._parts[arg][1]
            return parts[min(number, len(parts) - 1)]
        if own < 0:
            return arg
        if arg.target is aten.unsqueeze.default and args_of(arg)[1] % rank_of(arg) == own:
            return args_of(arg)[0]
        if arg.target is aten.full.default:
            shape = as_arguments(emit, without(sizes(arg), own, drop=True))
            return emit(arg.target, shape, *args_of(arg)[1:], **arg.kwargs)
        return emit(aten.select.int, arg, own, 0 if is_one(sizes(arg)[own]) else number)

    def _expand(self, emit: Emitter, node: fx.Node, dim: int) -> None:
        source, rank = args_of(node)[0], rank_of(node)
        own = dim - rank + rank_of(source)
        if source in self._parts or own < 0 or is_one(sizes(source)[own]):
            shape = as_arguments(emit, without(sizes(node), dim, drop=True))
            one = self._at(emit, source, rank, dim, 0)
            self._note(node, dim, [emit(aten.expand.default, one, shape)])

    def _pointwise(self, emit: Emitter, node: fx.Node, dim: int) -> None:
        rank, made = rank_of(node), []
        length = shape_of(node)[dim]
        stacked = [n for n in node.all_input_nodes if n in self._parts]
        if not isinstance(length, int) or any(self._dim(node, n) != dim for n in stacked):
            return
        for number in range(length):
            at = functools.partial(self._at, emit, rank=rank, dim=dim, number=number)
            args, kwargs = fx.map_arg((node.args, node.kwargs), at)
            made.append(emit(node.target, *args, **kwargs))
        self._note(node, dim, made)

    def _reduce(self, emit: Emitter, node: fx.Node, source: fx.Node) -> None:
        (dim, parts), rank = self._parts[source], rank_of(source)
        given, *keep = [*args_of(node)[1:], None, None][:2]
        over = [d % rank for d in given or range(rank)]
        rest = [d - (d > dim) for d in over if d != dim]
        if rest:
            parts = [emit(_BY_DIM[node.target], p, rest, *filter(None, keep)) for p in parts]
        if dim not in over:
            dim -= 0 if keep[0] else sum(d < dim for d in over)
            self._note(node, dim, parts)
            return
        count = hint(shape_of(source)[dim])
        every = [parts[min(number, len(parts) - 1)] for number in range(count)]
        made = functools.reduce(functools.partial(emit, _TOGETHER[node.target]), every)
        if node.target in _MEANS:
            made = emit(aten.div.Tensor, made, count)
        if keep[0]:
            self._note(node, dim, [made])
        else:
            node.replace_all_uses_with(made)

    def _view(self, emit: Emitter, node: fx.Node, source: fx.Node) -> None:
        dim, parts = self._parts[source]
        if node.target is aten.select.int:
            self._take(node, source, *args_of(node)[1:])
        elif len(parts) == 1 and sizes(node) == without(sizes(source), dim, drop=True):
            node.replace_all_uses_with(parts[0])
        elif node.target in FLAT:
            with contextlib.suppress(NotUnderstood):
                dim = moved(sizes(source), dim, sizes(node))
                shape = as_arguments(emit, without(sizes(node), dim, drop=True))
                self._note(node, dim, [emit(aten.reshape.default, p, shape) for p in parts])

    def _put(self, emit: Emitter, node: fx.Node, dim: int) -> None:
        into, source, along, number = args_of(node)
        rank, length = rank_of(node), hint(shape_of(node)[dim])
        if along % rank == dim:
            others = [self._at(emit, into, rank, dim, n) for n in range(length)]
            others[number] = source
            self._note(node, dim, others)

    def _take(self, node: fx.Node, source: fx.Node, dim: int, number: int) -> None:
        along, parts = self._parts.get(source, (None, []))
        if along == dim % rank_of(source):
            number %= hint(shape_of(source)[dim])
            node.replace_all_uses_with(parts[min(number, len(parts) - 1)])
