"""One rule an operator: what the body of a head computes for it, chunk by chunk.

A rule takes the node and the ``Place`` in which another operand wants it (None: it was reached from
what it reads), and says what of the body it is, or raises ``NotUnderstood``.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, value_of
from hot_compile.passes.base.operators import CASTS, RESHAPES, SPLITS, SQUEEZES
from hot_compile.passes.head.facts import (
    Another,
    Fact,
    Following,
    Place,
    Reader,
    Rule,
    sizes,
)
from hot_compile.passes.head.operands import (
    NotUnderstood,
    args_of,
    count,
    has_size,
    is_one,
    is_tensor,
    rank_of,
    same_rows,
    same_size,
    without,
)
from hot_compile.passes.head.parts import cat, pad, put, taken


def pointwise(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """Any operator that works element by element."""
    place = place or _broadcast(at, node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: at.operand(arg, place).value)
    op: Any = node.target
    if op._overloadname == "Scalar" and not all(map(is_tensor, node.all_input_nodes)):
        op = op.overloadpacket.Tensor  # a body has sizes as tensors
    return Fact(at.emit(op, *args, **kwargs), place)


def _broadcast(at: Following, node: fx.Node) -> Place:
    """Where the columns of what is made of operands with facts lie."""
    shape = sizes(node)
    found: set[tuple[Any, Any]] = set()
    for arg in node.all_input_nodes:
        if arg in at.facts:
            own = at.facts[arg].place
            shift = len(shape) - len(own.shape)
            axis = None if own.axis is None else own.axis + shift
            if axis is None and count(own.lead) != count(shape):
                axis = _spread((1,) * shift + own.shape, shape)
            found.add((axis, own.window))
    wide = [one for one in found if one[0] is not None] or list(found)
    if len(wide) != 1:
        raise NotUnderstood("logits of different rows are combined")
    ((axis, window),) = wide
    return Place(shape, axis, window)


def _spread(own: Any, shape: Any) -> int:
    """The only dimension along which one number a row is broadcast."""
    dims = [
        n for n, (a, b) in enumerate(zip(own, shape, strict=True)) if is_one(a) and not is_one(b)
    ]
    if len(dims) != 1:
        raise NotUnderstood("numbers per row are spread over rows")
    return dims[0]


def _cast(at: Following, node: fx.Node, place: Place | None) -> Fact:
    fact = _first(at, node, place)
    dtype = node.meta["val"].dtype
    value = at.emit(aten._to_copy.default, fact.value, dtype=dtype)
    return Fact(value, dataclasses.replace(fact.place, shape=sizes(node)))


def _same(at: Following, node: fx.Node, place: Place | None) -> Fact:
    return _first(at, node, place)


def _first(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """The first operand's; ``place``: where it lies if it is not known yet."""
    source = args_of(node)[0]
    if source in at.facts:
        return at.facts[source]
    if place is None:
        raise NotUnderstood("the logits are no operand")
    return at.operand(source, place)


# Views


def _reshape(at: Following, node: fx.Node, place: Place | None) -> Fact:
    before, after = sizes(args_of(node)[0]), sizes(node)
    wanted = None
    if place is not None:
        axis = None if place.axis is None else moved(after, place.axis, before)
        wanted = Place(before, axis, place.window)
    fact = _first(at, node, wanted)
    own = fact.place
    axis = None if own.axis is None else moved(before, own.axis, after)
    return Fact(fact.value, Place(after, axis, own.window))


def moved(before: Any, axis: int, after: Any) -> int:
    """Where a view puts the columns."""
    lead = count(before[:axis])
    for place, size in enumerate(after):
        if same_size(size, before[axis]) and count(after[:place]) == lead:
            return place
    raise NotUnderstood("a view splits the vocabulary")


def _permute(at: Following, node: fx.Node, place: Place | None) -> Fact:
    rank = rank_of(node)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [n % rank for n in args_of(node)[1]]
    else:
        a, b = (0, rank - 1) if node.target is aten.t.default else args_of(node)[1:]
        order[a], order[b] = order[b], order[a]
    shape, wanted = sizes(args_of(node)[0]), None
    if place is not None:
        wanted = Place(shape, None if place.axis is None else order[place.axis], place.window)
    fact = _first(at, node, wanted)
    axis = None if fact.place.axis is None else order.index(fact.place.axis)
    rest = [n for place, n in enumerate(order) if place != axis and not is_one(shape[n])]
    if sorted(rest) != rest:
        raise NotUnderstood("rows of the logits change their order")
    return Fact(fact.value, Place(sizes(node), axis, fact.place.window))


def _expand(at: Following, node: fx.Node, place: Place | None) -> Fact:
    place = place or _broadcast(at, node)
    return Fact(at.operand(args_of(node)[0], place).value, place)


def _full(at: Following, node: fx.Node, place: Place | None) -> Fact:
    if place is None:
        raise NotUnderstood("a size of the logits fills something")
    return Fact(at.constant(node), place)


# Along the columns


def _reduce(at: Following, node: fx.Node, place: Place | None) -> Fact | None:
    """A sum, mean or maximum over columns; over rows as well where that can follow outside."""
    source, rest = args_of(node)[0], args_of(node)[1:]
    fact = _known(at, source)
    own, rank = fact.place, rank_of(source)
    given: Any = rest[0] if rest and rest[0] is not None and rest[0] != [] else list(range(rank))
    dims = {d % rank for d in ([given] if isinstance(given, int) else given)}
    if own.axis is None:
        raise NotUnderstood("rows are reduced")
    value, rows = at.whole(fact), {n for n in range(rank) if not is_one(own.shape[n])} - {own.axis}
    if own.axis not in dims:
        if node.target is not aten.sum.dim_IntList or not rows <= dims or own.window:
            raise NotUnderstood("the logits are reduced over rows")
        at.readers[node] = Reader("columns", value, None)
        return None
    keywords: dict[str, Any] = {key: own for key, own in node.kwargs.items() if key == "dtype"}
    if not dims & rows:
        over = 1 if node.target in _ONE_DIM else [1]
        if node.target is aten.var.correction:
            value = at.emit(node.target, value, over, **{**node.kwargs, "keepdim": True})
        else:
            value = at.emit(_BY_DIM.get(node.target, node.target), value, over, True, **keywords)
        return Fact(value, Place(sizes(node), None, own.window))
    if node.target not in _TWICE:
        raise NotUnderstood("the logits are reduced over more than the vocabulary")
    if value_of(node).dtype.itemsize < 4 and value_of(node).is_floating_point():
        keywords["dtype"] = torch.float32  # rounded once, behind all rows
    if node.target is aten.amax.default:
        keywords = {}
    value = at.emit(_TWICE[node.target], value, [1], True, **keywords)
    lead = without(own.shape, own.axis, drop=True)
    then = tuple(d - (d > own.axis) for d in sorted(dims - {own.axis}))
    at.sums[node] = Fact(value, Place(lead, None, own.window), (_TWICE[node.target], then))
    return None


_ONE_DIM = {aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim, aten.prod.dim_int}
_TWICE = {
    aten.sum.default: aten.sum.dim_IntList,
    aten.sum.dim_IntList: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.mean.dim: aten.mean.dim,
    aten.amax.default: aten.amax.default,
}
"""What is the same of all rows' as of all elements."""
_OF_COLUMNS = {aten.amin.default, aten.logsumexp.default, aten.var.correction}
REDUCTIONS = {*_TWICE, *_ONE_DIM, *_OF_COLUMNS}
_BY_DIM: dict[Any, Any] = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}


def _known(at: Following, node: fx.Node) -> Fact:
    if node not in at.facts:
        raise NotUnderstood("a sum of a tensor that is no logits")
    return at.facts[node]


def _along(dim: int) -> Rule:
    """An operator that works along the dimension its argument ``dim`` names."""

    def rule(at: Following, node: fx.Node, place: Place | None) -> Fact:
        source = args_of(node)[0]
        fact = _known(at, source)
        args = [*args_of(node)[1:], *(_LAST if len(args_of(node)) == dim else ())]
        if fact.place.axis is None or args[dim - 1] % rank_of(source) != fact.place.axis:
            raise NotUnderstood("rows are sorted")
        args[dim - 1] = 1
        value = at.emit(node.target, at.whole(fact), *args, **node.kwargs)
        return Fact(value, fact.place)

    return rule


_LAST = (-1,)
_PAIRS = {
    aten.cumsum.default, aten.sort.default, aten.max.dim, aten.min.dim, aten.median.dim,
}  # fmt: skip


def _item(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """One of several results: a sorted tensor's, or a part."""
    source, number = args_of(node)
    if source.target in SPLITS:
        return taken(at, node, place)
    fact = _known(at, source)
    value, shape = at.emit(operator.getitem, fact.value, number), sizes(node)
    if len(shape) < len(fact.place.shape):  # max along a dimension that is gone
        value, axis = at.emit(aten.unsqueeze.default, value, 1), None
    else:
        axis = fact.place.axis
    return Fact(value, Place(shape, axis, fact.place.window))


def _gather(at: Following, node: fx.Node, place: Place | None) -> Fact:
    source, dim, index = args_of(node)[:3]
    fact = _known(at, source)
    axis, shape = fact.place.axis, sizes(node)
    if axis is None or dim % rank_of(node) != axis:
        raise NotUnderstood("rows of the logits are gathered")
    if not same_rows(source, node, axis):
        raise NotUnderstood("one column is picked of some of the rows")
    own = Place(shape, axis, fact.place.window)
    picked = at.whole(dataclasses.replace(at.operand(index, own), place=own))
    value = at.emit(aten.gather.default, at.whole(fact), 1, picked)
    return Fact(value, own if not is_one(shape[axis]) else dataclasses.replace(own, axis=None))


def _scatter(at: Following, node: fx.Node, place: Place | None) -> Fact:
    into, dim, index, source = args_of(node)[:4]
    shape = sizes(node)
    place = place or Place(shape, dim % len(shape), _window(at, node))
    axis = dim % len(shape)
    if axis != place.axis or not same_rows(node, index, axis):
        raise NotUnderstood("rows of the logits are scattered")
    own = dataclasses.replace(place, shape=sizes(index))
    picked = at.whole(dataclasses.replace(at.operand(index, own), place=own))
    if isinstance(source, fx.Node):
        source = at.whole(dataclasses.replace(at.operand(source, own), place=own))
    base = at.whole(dataclasses.replace(at.operand(into, place), place=place))
    return Fact(at.emit(node.target, base, 1, picked, source, **node.kwargs), place)


def _index(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """Rows of another tensor; those of logits have been picked before the product, if they can."""
    source, indices = args_of(node)
    if place is None or place.axis != 1 or len(indices) != 1 or rank_of(source) != 2:
        raise NotUnderstood("rows of the logits are picked by an index")
    lead = without(place.shape, 1, drop=True)
    numbers = at.leaf("rows", indices[0], Place(lead, None, place.window))
    numbers = at.emit(aten.select.int, numbers, 1, 0)
    return Fact(at.emit(aten.index.Tensor, at.leaf("all rows", source, place), [numbers]), place)


def _window(at: Following, node: fx.Node) -> Any:
    """Which rows the operands with facts have."""
    found = {at.facts[n].place.window for n in node.all_input_nodes if n in at.facts}
    if len(found) != 1:
        raise NotUnderstood("logits of different rows are combined")
    return found.pop()


RULES: dict[Any, Rule] = {
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.detach.default), _same),
    **dict.fromkeys(RESHAPES | SQUEEZES, _reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    aten.expand.default: _expand,
    aten.full.default: _full,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **{op: _along(2) for op in (aten.topk.default, aten.kthvalue.default)},
    **dict.fromkeys(_PAIRS, _along(1)),
    operator.getitem: _item,
    aten.gather.default: _gather,
    **dict.fromkeys((aten.scatter.value, aten.scatter.src, aten.scatter_add.default), _scatter),
    aten.index.Tensor: _index,
    **dict.fromkeys((aten.slice.Tensor, aten.select.int), taken),
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default), put),
    aten.constant_pad_nd.default: pad,
    aten.cat.default: cat,
    **dict.fromkeys(SPLITS, _same),
}
"""Operators that work element by element need none."""


def follow(product: fx.Node) -> Following:
    """All that is made of ``product`` and of what its results meet.

    Raises:
        NotUnderstood: with the reason.
    """
    width = sizes(product)[1]
    for node in product.graph.nodes:  # sizes found to be equal must be so before they are read
        if node.target is aten.gather.default and has_size(args_of(node)[0], width):
            same_rows(args_of(node)[0], node, args_of(node)[1] % rank_of(node))
    seeds = {product: Place(sizes(product), 1, ())}
    while True:
        try:
            return Following(seeds, RULES, pointwise)
        except Another as met:
            seeds[met.node] = met.place
