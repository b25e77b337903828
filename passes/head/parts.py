"""Rules for what takes, or puts back, some of the rows or some of the columns.

Rows that are not taken stay in the body: which rows are meant is noted in ``Place.window``, and
what puts them back masks the others.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from hot_compile.passes.base.graph import aten
from hot_compile.passes.base.operators import SPLITS
from hot_compile.passes.head.facts import Fact, Following, Place, sizes
from hot_compile.passes.head.operands import Cut, NotUnderstood, args_of, end_of, is_one, without
from hot_compile.passes.head.sizes import Size, plus, size_of


@dataclasses.dataclass(frozen=True)
class _Part:
    """``start:stop`` along ``dim``, a dimension that the part itself lacks if ``gone``."""

    dim: int
    start: Size
    stop: Size
    gone: bool = False

    def outer(self, axis: int) -> int:
        """Where the columns of the whole lie if the part has them at ``axis``."""
        return axis + (self.gone and self.dim <= axis)

    def cut(self, shape: Any, axis: int) -> Cut:
        """Of the rows of a whole of ``shape``."""
        lead = without(shape, axis, drop=True)
        return Cut(lead, self.dim - (self.dim > axis), self.start, self.stop)


def taken(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """A slice, a row or a column, or one of the parts of a split."""
    if node.target is operator.getitem:
        return _narrowed(at, node, *_piece(node), place)
    source = args_of(node)[0]
    shape = sizes(source)
    slicing = node.target is aten.slice.Tensor
    return _narrowed(at, node, source, _part(args_of(node)[1:], shape, slicing), place)


def _part(given: Sequence[Any], shape: Any, slicing: bool) -> _Part:
    dim = (given[0] if given else 0) % len(shape)
    if not slicing:
        start = end_of(given[1], 0, shape[dim])
        return _Part(dim, start, plus(start, 1), gone=True)
    start, stop, step = [*given, None, None, None][1:4]
    if step not in (None, 1):
        raise NotUnderstood("every so manieth of the rows is picked")
    whole = shape[dim]
    return _Part(dim, end_of(start, 0, whole), end_of(stop, whole, whole))


def _piece(item: fx.Node) -> tuple[fx.Node, _Part]:
    """What a part of a split is a part of, and which."""
    split, number = args_of(item)
    source, *given = args_of(split)
    where = SPLITS[split.target] - 1
    shape = sizes(source)
    dim = (given[where] if len(given) > where else 0) % len(shape)
    if split.target is aten.unbind.int:
        return source, _Part(dim, number, number + 1, gone=True)
    if split.target is aten.split.Tensor:
        start: Size = size_of(given[0]) * number if number else 0  # type: ignore[operator]
    else:
        start = 0
        for size in given[0][:number]:
            start = plus(start, size_of(size))
    return source, _Part(dim, start, plus(start, sizes(item)[dim]))


def _narrowed(
    at: Following, node: fx.Node, source: fx.Node, part: _Part, place: Place | None
) -> Fact:
    """Some rows or columns of ``source``: rows are no less in the body."""
    fact = at.facts.get(source) or at.operand(source, _before(source, part, place))
    own = fact.place
    if own.axis is None:
        if is_one(own.shape[part.dim]):  # as behind a gather of one column
            return Fact(fact.value, Place(sizes(node), None, own.window))
        raise NotUnderstood("some of the rows' numbers")
    if part.dim == own.axis:
        value = at.emit(aten.slice.Tensor, at.whole(fact), 1, part.start, part.stop)
        return Fact(value, Place(sizes(node), None if part.gone else own.axis, own.window))
    window = own.window
    if (part.start, part.stop) != (0, own.shape[part.dim]):
        window = (*window, part.cut(own.shape, own.axis))
    axis = own.axis - (part.gone and part.dim < own.axis)
    return Fact(fact.value, Place(sizes(node), axis, window))


def _before(source: fx.Node, part: _Part, place: Place | None) -> Place:
    """Where the whole lies whose part lies at ``place``."""
    shape = sizes(source)
    if place is None or place.axis is None:
        raise NotUnderstood("some of the rows' numbers")
    axis, window = part.outer(place.axis), place.window
    if part.dim != axis and (part.start, part.stop) != (0, shape[part.dim]):
        if not window or window[-1] != part.cut(shape, axis):
            raise NotUnderstood("other rows of another tensor")
        window = window[:-1]
    return Place(shape, axis, window)


def put(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """A part put into a whole."""
    into, source, *given = args_of(node)
    slicing = node.target is aten.slice_scatter.default
    return _widened(at, sizes(node), into, source, _part(given, sizes(node), slicing), place)


def _widened(
    at: Following, shape: Any, into: Any, source: Any, part: _Part, place: Place | None
) -> Fact:
    """``into`` [shape] with ``source`` (a node, or what it is) in the place of its part."""
    fact = at.facts.get(source) if isinstance(source, fx.Node) else source
    if fact is None:
        if place is None or place.axis is None:
            raise NotUnderstood("something is put among the logits")
        fact = at.operand(source, _inside(source, shape, part, place))
    own = fact.place
    if own.axis is None and is_one(shape[part.dim]):  # as in front of a scatter to one column
        return Fact(fact.value, Place(shape, None, own.window))
    axis = part.dim if own.axis is None and part.gone else own.axis
    if axis is None:
        raise NotUnderstood("numbers of some of the rows")
    axis = axis if own.axis is None else part.outer(axis)
    if part.dim == axis:
        whole = Place(shape, axis, own.window)
        base = at.whole(_filled(at, into, whole))
        value = at.emit(aten.slice_scatter.default, base, at.whole(fact), 1, part.start, part.stop)
        return Fact(value, whole)
    if (part.start, part.stop) == (0, shape[part.dim]):
        return Fact(fact.value, Place(shape, axis, own.window))
    if not own.window or own.window[-1] != part.cut(shape, axis):
        raise NotUnderstood("rows are put back elsewhere than they were taken from")
    whole = Place(shape, axis, own.window[:-1])
    base = _filled(at, into, whole).value
    mask = at.mask(own.window, at.products[0])
    return Fact(at.emit(aten.where.self, mask, fact.value, base), whole)


def _inside(source: fx.Node, shape: Any, part: _Part, place: Place) -> Place:
    """Where a part lies whose whole lies at ``place``."""
    axis = _axis(place)
    if part.dim == axis:
        return Place(sizes(source), None if part.gone else axis, place.window)
    window = place.window
    if (part.start, part.stop) != (0, shape[part.dim]):
        window = (*window, part.cut(shape, axis))
    return Place(sizes(source), axis - (part.gone and part.dim < axis), window)


def _filled(at: Following, into: Any, place: Place) -> Fact:
    """A node, or a number, as broadcast to ``place``."""
    if isinstance(into, fx.Node):
        return dataclasses.replace(at.operand(into, place), place=place)
    like = at.products[0].meta["val"]
    return Fact(
        at.emit(aten.full.default, [1, 1], into, dtype=like.dtype, device=like.device), place
    )


def pad(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """Of rows that a slice left out, or of columns."""
    source, pads, *value = args_of(node)
    shapes = [sizes(source)]
    parts: list[_Part] = []
    for number in range(0, len(pads), 2):
        before, after = map(size_of, pads[number : number + 2])
        if (before, after) == (0, 0):
            continue
        if any(isinstance(n, int) and n < 0 for n in (before, after)):
            raise NotUnderstood("padding that cuts off")
        dim, shape = len(shapes[0]) - 1 - number // 2, shapes[-1]
        stop = plus(before, shape[dim])
        parts.append(_Part(dim, before, stop))
        shapes.append((*shape[:dim], plus(stop, after), *shape[dim + 1 :]))
    fact = at.facts.get(source)
    if fact is None:
        raise NotUnderstood("padding of another tensor")
    for shape, part in zip(shapes[1:], parts, strict=True):
        fact = _widened(at, shape, value[0] if value else 0, fact, part, place)
    return Fact(fact.value, dataclasses.replace(fact.place, shape=sizes(node)))


def cat(at: Following, node: fx.Node, place: Place | None) -> Fact:
    """Of columns, or of rows that were parts of the same."""
    pieces, dim = args_of(node)[0], (args_of(node)[1] if len(args_of(node)) > 1 else 0)
    shape = sizes(node)
    dim %= len(shape)
    known = next((at.facts[piece].place for piece in pieces if piece in at.facts), None)
    if known is None or known.axis is None:
        raise NotUnderstood("numbers of some of the rows are put together")
    if dim == known.axis:
        facts = [at.operand(p, Place(sizes(p), dim, known.window)) for p in pieces]
        value = at.emit(aten.cat.default, [at.whole(fact) for fact in facts], 1)
        return Fact(value, Place(shape, dim, known.window))
    whole, start = Place(shape, known.axis, known.window[:-1]), size_of(0)
    fact: Any = 0
    for piece in pieces:
        stop = plus(start, sizes(piece)[dim])
        part = _Part(dim, start, stop)
        inside = _inside(piece, shape, part, whole)
        own = at.facts[piece].place if piece in at.facts else inside
        base = fact.value if isinstance(fact, Fact) else _filled(at, 0, whole).value
        if own.window != (*whole.window, part.cut(shape, known.axis)):
            raise NotUnderstood("rows are put back elsewhere than they were taken from")
        mask = at.mask(own.window, at.products[0])
        value = at.operand(piece, inside).value
        fact = Fact(at.emit(aten.where.self, mask, value, base), whole)
        start = stop
    return fact


def _axis(place: Place) -> int:
    assert place.axis is not None
    return place.axis
