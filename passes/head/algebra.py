"""What a tensor as wide as the vocabulary holds, as a sum of a few known forms. Pure values.

Every such tensor between a head's product y and its gradients is

    sum over terms of  coefficient[row] * basis[row, column]     (each basis: see ``Basis``)

so no wide tensor needs to be computed to know the loss and the gradients: the coefficients and four
statistics a row say it all (``runtime/reference/head.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from hot_compile.passes.head.sizes import Size, minus


@dataclasses.dataclass(frozen=True)
class Linear:
    """A sum of multiples of row quantities: what logits are shifted by before ``exp``.

    ``parts``: (quantity, factor) in a fixed order; a quantity is ``"max"``, ``"lse"`` or the
    ``Rows`` of a node that means nothing more to us.
    """

    parts: tuple[tuple[Any, float], ...] = ()

    def plus(self, other: Linear, factor: float = 1.0) -> Linear:
        """self + factor * other."""
        total = dict(self.parts)
        for quantity, amount in other.parts:
            total[quantity] = total.get(quantity, 0.0) + factor * amount
        return Linear(tuple((q, amount) for q, amount in total.items() if amount != 0))


MAX, LSE = Linear((("max", 1.0),)), Linear((("lse", 1.0),))


@dataclasses.dataclass(frozen=True)
class Expr:
    """One number per row, to be emitted as nodes later.

    ``op`` with its ``args``: "const" (float); "rows" (node, shape it is broadcast to, the
    vocabulary's dimension being 1); "mul", "add" (two Expr); "exp" (Linear); "linear" (Linear);
    "take" (column node, Index); "picked" (Index): z at the index; "total": z summed over columns;
    "where" (node, shape, Expr, Expr); "widen" (Expr, Window).
    """

    op: str
    args: tuple[Any, ...] = ()

    def __mul__(self, other: Expr) -> Expr:
        if self.op == "const" and other.op == "const":
            return const(self.args[0] * other.args[0])
        if other.op == "const":
            self, other = other, self
        if self.op == "const" and self.args[0] == 1:
            return other
        return Expr("mul", (self, other))

    def __add__(self, other: Expr) -> Expr:
        if self.op == "const" and other.op == "const":
            return const(self.args[0] + other.args[0])
        return Expr("add", (self, other))

    @property
    def constant(self) -> float | None:
        """Its number, if it is the same in every row and known."""
        return self.args[0] if self.op == "const" else None

    def nodes(self) -> Iterator[fx.Node]:
        """Every node it reads."""
        for arg in self.args:
            yield from _nodes_in(arg)


def _nodes_in(arg: Any) -> Iterator[fx.Node]:
    if isinstance(arg, fx.Node):
        yield arg
    elif isinstance(arg, Expr):
        yield from arg.nodes()
    elif isinstance(arg, Index):
        yield arg.node
    elif isinstance(arg, Linear):
        for quantity, _ in arg.parts:
            if isinstance(quantity, Expr):
                yield from quantity.nodes()


def const(value: float) -> Expr:
    """The same number in every row."""
    return Expr("const", (float(value),))


def total_of(parts: Iterable[Expr]) -> Expr:
    """Their sum; zero of none."""
    total: Expr | None = None
    for part in parts:
        total = part if total is None else total + part
    return const(0) if total is None else total


ONE, MINUS = const(1), const(-1)


def exp(exponent: Linear) -> Expr:
    """exp of it."""
    return Expr("exp", (exponent,)) if exponent.parts else ONE


@dataclasses.dataclass(frozen=True)
class Index:
    """A column a row: equal where the computations are, whatever views the graph takes of them."""

    signature: str
    node: fx.Node = dataclasses.field(compare=False)
    shape: tuple[Any, ...] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Some of the rows: ``start:stop`` along ``dim`` of what the rows were before, ``lead``."""

    lead: tuple[Size, ...]
    dim: int
    start: Size
    stop: Size

    @property
    def left(self) -> tuple[Size, ...]:
        """The rows' shape afterwards."""
        length = minus(self.stop, self.start)
        return (*self.lead[: self.dim], length, *self.lead[self.dim + 1 :])


Window = tuple[Cut, ...]


@dataclasses.dataclass(frozen=True)
class Basis:
    """A known form of [rows, columns].

    ``kind``: "one"; "column" (the same row everywhere: ``what``, a node [O]); "y", the product
    itself; "tanh", tanh(inner * y) with ``what`` = inner; "tanh2", its square; "p",
    exp(z - lse); "onehot" (``what``: an Index); "extra" (``what``: a node, a gradient of outside).
    """

    kind: str
    what: Any = None


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient * basis, times the cap's slope 1 - tanh^2 if ``slope``."""

    basis: Basis
    coefficient: Expr
    slope: bool = False


@dataclasses.dataclass(frozen=True)
class Wide:
    """A tensor as wide as the logits: its terms, where its columns lie, which rows it has."""

    terms: tuple[Term, ...]
    axis: int
    window: Window = ()

    def scaled(self, factor: Expr) -> Wide:
        """Every row times its factor."""
        return self.mapped(lambda c: factor * c)

    def mapped(self, change: Any) -> Wide:
        """Every coefficient changed."""
        terms = (dataclasses.replace(t, coefficient=change(t.coefficient)) for t in self.terms)
        return dataclasses.replace(self, terms=tuple(terms))

    def plus(self, other: Wide) -> Wide:
        """Their sum, terms of one basis joined."""
        return dataclasses.replace(self, terms=joined((*self.terms, *other.terms)))


def joined(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Terms of the same basis (and slope) added up."""
    total: dict[tuple[Basis, bool], Expr] = {}
    for term in terms:
        key = term.basis, term.slope
        total[key] = total[key] + term.coefficient if key in total else term.coefficient
    return tuple(Term(basis, coefficient, slope) for (basis, slope), coefficient in total.items())
