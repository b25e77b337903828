"""Facts about the nodes around a head's logits, and the body: what one chunk of rows computes.

A node has a fact if its row i depends on nothing of other rows but what all rows share. The body is
a small graph of its own, in which every such node is [R, columns], or [R, 1], or [1, columns]:
views are gone, rows that a slice left out are computed and thrown away. One rule an operator
(``rules.py``) says what the body computes for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from hot_compile.passes.base.graph import aten, closure, walk
from hot_compile.passes.base.operators import MATRIX_PRODUCTS, is_pointwise
from hot_compile.passes.head.operands import (
    NotUnderstood,
    Shape,
    Window,
    args_of,
    count,
    is_one,
    is_random,
    is_tensor,
    numel,
    rank_of,
    without,
)
from hot_compile.passes.head.sizes import size_of

_WIDE = 8
"""A tensor with fewer columns than this part of the logits' may exist as a whole."""


@dataclasses.dataclass(frozen=True)
class Place:
    """How a tensor of the graph lies over rows and columns."""

    shape: Shape
    axis: int | None
    """Of its columns; None: it has one number a row."""
    window: Window
    """Which rows it has."""

    @property
    def width(self) -> Any:
        """Its columns."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def lead(self) -> Shape:
        """Its rows' shape, with 1 in the columns' place if they have one."""
        return self.shape if self.axis is None else without(self.shape, self.axis)


@dataclasses.dataclass(frozen=True)
class Fact:
    """What the body computes for a node."""

    value: fx.Node
    """[R or 1, columns or 1] in the body."""
    place: Place
    then: tuple[Any, tuple[int, ...]] | None = None
    """(operator, dimensions) by which this is reduced over rows outside."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Something of the joint graph that the body reads.

    ``kind``: "product" (a wide product, made chunk by chunk); "rows", of which a chunk gets its own
    (``node`` broadcast to ``place``); "shared", of which each chunk gets all (a number, a size
    or columns); "all rows", likewise; "mask" and "number": which rows are in ``place.window``, and
    the how manieth of them.
    """

    kind: str
    node: fx.Node
    place: Place


@dataclasses.dataclass(frozen=True)
class Reader:
    """A node that takes a wide tensor of the body out of it, as something small.

    ``kind``: "rows" (g W), "total" (g^T x), "columns" (g summed over rows).
    """

    kind: str
    gradient: fx.Node
    """In the body."""
    operand: fx.Node | None
    """W [O, I] or x [L, I], or x^T if ``flipped``: the graph has x^T g."""
    flipped: bool = False


Rule = Callable[["Following", fx.Node, Place | None], Fact | None]


class Another(Exception):
    """A tensor as wide as the logits that meets them, and is to be followed, too."""

    def __init__(self, node: fx.Node, place: Place) -> None:
        super().__init__(node, place)
        self.node, self.place = node, place


class Following:
    """``seeds``, a product and what its results meet, with their places, followed through a graph.

    Raises:
        NotUnderstood: something reads the logits, and needs them whole.
        Another: the same is to be done with one seed more.
    """

    def __init__(
        self, seeds: dict[fx.Node, Place], rules: dict[Any, Rule], pointwise: Rule
    ) -> None:
        self.body = fx.Graph()
        self.facts: dict[fx.Node, Fact] = {}
        self.leaves: dict[Leaf, fx.Node] = {}
        self.readers: dict[fx.Node, Reader] = {}
        self.sums: dict[fx.Node, Fact] = {}
        """Sums over columns and rows: the fact is that over the columns."""
        self.sizes: list[fx.Node] = []
        """Nodes that only ask how long something wide is."""
        self.returned: list[fx.Node] = []
        """What the caller gets as wide as the logits."""
        self.given: set[fx.Node] = set()
        """What is there as a whole in any case."""
        self.products = [node for node in seeds if is_product(node)]
        self.behind = closure(self.products)
        """The products, and all that depends on them."""
        self._seeds, self._rules, self._pointwise = seeds, rules, pointwise
        self._width = max(count((place.width,)) for place in seeds.values())
        first = self.leaf("product", self.products[0], seeds[self.products[0]])
        self._wholes: dict[tuple[fx.Node, Any], fx.Node] = {}
        self._length = self.emit(aten.sym_size.int, first, 0)
        for node in self.products[0].graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node in self._seeds:
            self.facts[node] = self._seed(node, self._seeds[node])
            return
        read = [n for n in node.all_input_nodes if n in self.facts]
        wide = [n for n in read if self.is_wide(n) and n in self.behind]
        if node.op == "output":
            self.returned = wide
        elif node.target is aten.sym_size.int:
            self.sizes += [node] if wide else []
        elif read and node.users:
            try:
                self._understand(node)
            except NotUnderstood:
                if wide:
                    raise

    def _seed(self, node: fx.Node, place: Place) -> Fact:
        if node in self.products:
            return Fact(self.leaf("product", node, place), place)
        try:
            fact = self.rule(node)(self, node, place)
        except NotUnderstood:
            fact = None
        if fact is not None and (fact.place.axis, fact.place.window) == (place.axis, place.window):
            return fact
        self.given.add(node)
        return Fact(self._given(node, place), place)

    def is_wide(self, node: fx.Node) -> bool:
        """It is better not there as a whole."""
        if node not in self.facts or node in self.given:
            return False
        return _WIDE * count((self.facts[node].place.width,)) > self._width

    def _understand(self, node: fx.Node) -> None:
        if node.target in MATRIX_PRODUCTS:
            self.readers[node] = self._reader(node)
        else:
            fact = self.rule(node)(self, node, None)
            if fact is not None:  # else it is noted elsewhere
                self.facts[node] = fact

    def rule(self, node: fx.Node) -> Rule:
        """What to make of ``node``."""
        found = self._rules.get(node.target)
        if found is None and is_pointwise(node):
            found = self._pointwise
        if found is None or is_random(node):
            raise NotUnderstood(f"the logits are also read by {_name(node)}")
        return found

    # The body

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the body."""
        return self.body.call_function(op, args, kwargs)

    def leaf(self, kind: str, node: fx.Node, place: Place) -> fx.Node:
        """The body's input for it."""
        leaf = Leaf(kind, node, place)
        if leaf not in self.leaves:
            self.leaves[leaf] = self.body.placeholder(f"input_{len(self.leaves)}")
            self.leaves[leaf].meta["leaf"] = leaf
        return self.leaves[leaf]

    def whole(self, fact: Fact) -> fx.Node:
        """The fact's value [R, columns], whatever it is broadcast from."""
        key = fact.value, fact.place.width
        if key not in self._wholes:
            size = [self._length, fact.place.width]
            self._wholes[key] = self.emit(aten.expand.default, fact.value, size)
        return self._wholes[key]

    def mask(self, window: Window, like: fx.Node) -> fx.Node:
        """[R, 1]: which rows lie in it."""
        return self.leaf("mask", like, Place((), None, window))

    # Operands

    def operand(self, arg: fx.Node, place: Place) -> Fact:
        """``arg`` as it is broadcast to ``place``, found or pulled into the body."""
        if not is_tensor(arg):
            return Fact(self.leaf("shared", arg, Place((), None, ())), place)
        known = self.facts.get(arg)
        padded = (1,) * (len(place.shape) - rank_of(arg)) + sizes(arg)
        if known is not None:
            return self._aligned(known, padded, place)
        if arg.target is aten.scalar_tensor.default:
            value = self.emit(aten.scalar_tensor.default, *arg.args, **arg.kwargs)
            return Fact(value, place)
        if not padded:
            return Fact(self.leaf("shared", arg, place), place)
        if place.axis is None or is_one(padded[place.axis]):
            return Fact(self._row(arg, place), place)
        if all(is_one(n) for n in without(padded, place.axis)):
            return Fact(self.leaf("shared", arg, Place(padded, place.axis, ())), place)
        raise Another(
            arg, Place(sizes(arg), place.axis - len(place.shape) + rank_of(arg), place.window)
        )

    def _row(self, arg: fx.Node, place: Place) -> fx.Node:
        if arg.target is aten.full.default:
            return self.constant(arg)
        return self.leaf("rows", arg, Place(place.lead, None, place.window))

    def constant(self, node: fx.Node) -> fx.Node:
        """A tensor of one number that it is full of."""
        shape = [1, 1] if sizes(node) else []
        value = node.meta["val"]
        return self.emit(
            aten.full.default, shape, args_of(node)[1], dtype=value.dtype, device=value.device
        )

    def _aligned(self, fact: Fact, padded: Shape, place: Place) -> Fact:
        own = fact.place
        if own.window != place.window:
            raise NotUnderstood("logits of different rows are combined")
        shift = len(place.shape) - len(own.shape)
        if own.axis is not None and own.axis + shift == place.axis:
            return fact
        single = own.axis is None and (place.axis is None or is_one(padded[place.axis]))
        if single and count(own.lead) == count(place.lead):
            return fact
        raise NotUnderstood("logits of different rows are combined")

    def _given(self, arg: fx.Node, place: Place) -> fx.Node:
        if place.axis != len(place.shape) - 1 or numel(arg) != count(place.shape):
            raise NotUnderstood("the logits meet a tensor of their size that lies otherwise")
        if not place.window:
            return self.leaf("rows", arg, place)
        every = self.leaf("all rows", arg, place)
        number = self.leaf("number", arg, Place((), None, place.window))
        return self.emit(aten.index.Tensor, every, [self.emit(aten.select.int, number, 1, 0)])

    # Products that read what the body computes

    def _reader(self, node: fx.Node) -> Reader:
        if node.target is not aten.mm.default:
            raise NotUnderstood("the logits, or their gradient, are read by another product")
        a, b = args_of(node)
        ours = a if a in self.facts else b
        fact, other = self.facts[ours], b if ours is a else a
        if fact.place.window or other in self.facts:
            raise NotUnderstood("the logits, or their gradient, are read by another product")
        value = self.whole(fact)
        if ours is a and fact.place.axis == 1:
            return Reader("rows", value, other)
        if ours is a and fact.place.axis == 0:
            return Reader("total", value, other)
        if fact.place.axis == 1:
            return Reader("total", value, other, flipped=True)
        raise NotUnderstood("the logits, or their gradient, are read by another product")


def ancestors(values: Iterable[fx.Node]) -> set[fx.Node]:
    """``values`` of a body and what they are made of."""
    return walk(values, lambda node: node.all_input_nodes)


def is_product(node: fx.Node) -> bool:
    """x W^T, perhaps with a bias."""
    if node.target is aten.addmm.default:
        return not node.kwargs and rank_of(args_of(node)[0]) == 1
    return node.target is aten.mm.default


def sizes(node: Any) -> Shape:
    """Sizes of a node's tensor; what is symbolic as ``Symbolic``."""
    return tuple(map(size_of, node.meta["val"].shape))


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
