"""Bodies that are a loss of one softmax: what its kernels need to know (``runtime/head/products``).

An abstract interpretation of a body: each wide value is a sum of known forms, each times one number
a row; each number a row is made of three statistics of the row and of what is known outside. What
is not of that kind raises ``NotUnderstood``, and the body is run as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, untranspose
from hot_compile.passes.head.facts import Fact, Following, Leaf, Reader, ancestors
from hot_compile.passes.head.operands import NotUnderstood, args_of, is_fma, signature

STATISTICS = {"max": 0, "lse": 1, "picked": 2, "total": 3}
Linear = dict[Any, float]
"""Quantity -> factor: "max", "lse" or a body's node of one number a row."""
Form = tuple[float, bool, float]
"""(inner, cap, outer): logits are outer * tanh(inner * y), or outer * y."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One number a row: ``node`` or a number; or a sum, or its exponential, that may yet cancel."""

    node: Any = None
    linear: Linear | None = None
    exponent: Linear | None = None


@dataclasses.dataclass(frozen=True)
class Basis:
    """A form of [rows, columns].

    ``kind``: "one"; "y", the product; "tanh", tanh(inner * y), ``what``: inner; "tanh2", its
    square; "p", exp(z - lse); "onehot". ``slope``: times 1 - tanh^2.
    """

    kind: str
    what: float = 1.0
    slope: bool = False


Wide = dict[Basis, Any]
"""Basis -> coefficient, a number or a node of the body."""
Value = Row | Wide


class Softmax:
    """A body as one softmax.

    Raises:
        NotUnderstood: it is more than that.
    """

    def __init__(self, at: Following, results: dict[fx.Node, Fact | Reader]) -> None:
        self._at = at
        self.form: Form | None = None
        self.index: fx.Node | None = None
        """Whose column of each row is picked, and where the one-hot is 1."""
        self.bias: fx.Node | None = None
        """Columns that are added right behind the product."""
        self._values: dict[fx.Node, Value] = {}
        self._linears: dict[fx.Node, Linear] = {}
        """Sums of which parts may yet cancel."""
        self._exponents: dict[Any, Linear] = {}
        self.statistics = {at.body.placeholder(name): place for name, place in STATISTICS.items()}
        self._named = {node.target: node for node in self.statistics}
        self.rows: dict[fx.Node, Any] = {}
        """Node of the graph -> its number per row, as a node of the body."""
        gradients = {r.gradient for r in results.values() if isinstance(r, Reader)}
        found = [r.gradient if isinstance(r, Reader) else r.value for r in results.values()]
        if len(at.products) != 1 or len(gradients) != 1:
            raise NotUnderstood("several products or gradients")
        _check_readers(at.products[0], results)
        wanted = ancestors(found)
        for node in list(at.body.nodes):
            if node in wanted:
                self._values[node] = self._value(node)
        if self.form is None:
            raise NotUnderstood("no softmax")
        for node, result in results.items():
            if isinstance(result, Fact):
                self._result(node, result)
        self.coefficients: tuple[Any, Any, Any] = self._coefficients(self._wide(gradients.pop()))

    def needs_statistics(self) -> bool:
        """The gradient's coefficients depend on the logits."""
        nodes = [c for c in self.coefficients if isinstance(c, fx.Node)]
        return not ancestors(nodes).isdisjoint(self.statistics)

    def _value(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return self._leaf(node, node.meta["leaf"])
        if node.target in (aten.full.default, aten.scalar_tensor.default):
            return Row(args_of(node)[node.target is aten.full.default])
        if node.target is aten.sym_size.int:
            return Row(node)
        given = [self._values.get(n) if isinstance(n, fx.Node) else n for n in node.args]
        if is_fma(node):
            return self.fma(node, *given)
        if node.target in RULES:
            return RULES[node.target](self, node, *given)
        if any(isinstance(self._values[n], dict) for n in node.all_input_nodes):
            raise NotUnderstood(f"{node.target} of the logits")
        return self._again(node)

    def _again(self, node: fx.Node) -> Row:
        """An operator on numbers per row, of what these are now."""

        def tensor(given: fx.Node) -> fx.Node:
            found = self.node(self._values[given])
            return found if isinstance(found, fx.Node) else self._number(found)

        args, kwargs = fx.map_arg((node.args, node.kwargs), tensor)
        made = self._at.emit(node.target, *args, **kwargs)
        return Row(made, linear={made: 1.0})

    def _leaf(self, node: fx.Node, leaf: Leaf) -> Value:
        if leaf.kind == "product":
            return {Basis("y"): 1.0}
        if leaf.place.axis is not None and leaf.place.shape:
            if leaf.kind == "shared":
                return {Basis("column"): node}
            raise NotUnderstood("another tensor of the logits' size")
        return Row(node, linear={node: 1.0})

    # Numbers per row

    def node(self, row: Any) -> Any:
        """A row's number as a node of the body, or a number."""
        if isinstance(row, dict):
            raise NotUnderstood("logits where a number per row is wanted")
        if not isinstance(row, Row):
            return row
        if row.node is not None:
            return row.node
        if row.exponent == {}:
            return 1.0
        if row.exponent is not None:
            made = self._at.emit(aten.exp.default, self._sum(row.exponent))
            self._exponents[made] = row.exponent
            return made
        made = self._sum(row.linear or {})
        if isinstance(made, fx.Node):
            self._linears[made] = row.linear or {}
        return made

    def _sum(self, linear: Linear) -> Any:
        total: Any = 0.0
        for quantity, factor in linear.items():
            node = self._named.get(quantity, quantity) if isinstance(quantity, str) else quantity
            total = self._plus(total, self._times(node, factor))
        return total

    def _times(self, a: Any, b: Any) -> Any:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if not isinstance(a, fx.Node):
            return a * b
        if not isinstance(b, fx.Node) and b in (0, 1):
            return a if b else 0.0
        made = self._at.emit(aten.mul.Tensor, a, b)
        if not isinstance(b, fx.Node):
            self._linears[made] = {q: f * b for q, f in self._linear_of(a).items()}
        return made

    def _plus(self, a: Any, b: Any) -> Any:
        if not isinstance(a, fx.Node):
            a, b = b, a
        if not isinstance(a, fx.Node):
            return a + b
        if not isinstance(b, fx.Node):
            return self._at.emit(aten.add.Tensor, a, b) if b else a
        made = self._at.emit(aten.add.Tensor, a, b)
        self._linears[made] = _total(self._linear_of(a), self._linear_of(b))
        return made

    def _linear_of(self, node: fx.Node) -> Linear:
        """What a number per row is a sum of."""
        return self._linears.get(node, {node: 1.0})

    # Wide values

    def _wide(self, node: fx.Node) -> Wide:
        value = self._values[node]
        return value if isinstance(value, dict) else {Basis("one"): self.node(value)}

    def _as_wide(self, value: Any) -> Wide:
        if isinstance(value, dict):
            return value
        number = self.node(value)
        return {} if not isinstance(number, fx.Node) and number == 0 else {Basis("one"): number}

    def _scaled(self, wide: Wide, factor: Any) -> Wide:
        return {basis: self._times(c, factor) for basis, c in wide.items()}

    def _added(self, a: Wide, b: Wide) -> Wide:
        total = dict(a)
        for basis, c in b.items():
            total[basis] = self._plus(total[basis], c) if basis in total else c
        column = total.pop(Basis("column"), None)
        if column is not None:
            if total != {Basis("y"): 1.0} or self.bias not in (None, column):
                raise NotUnderstood("columns are added to the logits")
            self.bias = column
        return total

    def add(self, node: fx.Node, a: Any, b: Any) -> Value:
        """a + b, or a - b."""
        if node.kwargs:
            raise NotUnderstood("a sum with alpha")
        sign = -1.0 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1.0
        if isinstance(a, dict) or isinstance(b, dict):
            return self._added(self._as_wide(a), self._scaled(self._as_wide(b), sign))
        linear = _linear(a), _linear(b)
        if None in linear:
            return self._again(node)
        return Row(linear=_total(*linear, sign))  # type: ignore[arg-type]

    def mul(self, node: fx.Node, a: Any, b: Any) -> Value:
        """a * b."""
        if isinstance(a, dict) and isinstance(b, dict):
            return self._product(a, b)
        if isinstance(a, dict) or isinstance(b, dict):
            wide, row = (a, b) if isinstance(a, dict) else (b, a)
            return self._scaled(wide, self.node(row))
        made = self._times(self.node(a), self.node(b))
        return Row(made, linear={made: 1.0} if isinstance(made, fx.Node) else None)

    def _product(self, a: Wide, b: Wide) -> Wide:
        for one, other in ((a, b), (b, a)):
            if set(other) <= {Basis("one")}:
                return self._scaled(one, other.get(Basis("one"), 0.0))
            kinds = {basis.kind: c for basis, c in other.items() if not basis.slope}
            if len(other) == 2 and kinds == {"one": 1.0, "tanh2": -1.0}:
                return {dataclasses.replace(basis, slope=True): c for basis, c in one.items()}
        ((basis, c),) = a.items() if len(a) == 1 else ((None, None),)
        if a != b or basis is None or basis.kind != "tanh":
            raise NotUnderstood("logits are multiplied with each other")
        return {Basis("tanh2", basis.what): self._times(c, c)}

    def div(self, node: fx.Node, a: Any, b: Any) -> Value:
        """a / b, b a number a row."""
        if not isinstance(a, dict) or node.kwargs:
            return self._again(node)
        below = self.node(b)
        if isinstance(below, fx.Node):
            return self._scaled(a, self._at.emit(aten.reciprocal.default, below))
        return self._scaled(a, 1 / below)

    def fma(self, node: fx.Node, a: Any, b: Any, c: Any) -> Value:
        """a * b + c."""
        if not any(isinstance(value, dict) for value in (a, b, c)):
            return self._again(node)
        return self._added(self._as_wide(self.mul(node, a, b)), self._as_wide(c))

    def neg(self, node: fx.Node, a: Any) -> Value:
        """-a."""
        return self._scaled(a, -1.0) if isinstance(a, dict) else self._again(node)

    def where(self, node: fx.Node, condition: Any, a: Any, b: Any) -> Value:
        """A choice a row."""
        if not (isinstance(a, dict) or isinstance(b, dict)):
            return self._again(node)
        which = self.node(condition)
        yes, no = self._as_wide(a), self._as_wide(b)

        def chosen(basis: Basis) -> Any:
            both = (yes.get(basis, 0.0), no.get(basis, 0.0))
            made = [n if isinstance(n, fx.Node) else self._number(n) for n in both]
            return self._at.emit(aten.where.self, which, *made)

        return {basis: chosen(basis) for basis in {**yes, **no}}

    def _number(self, value: float) -> fx.Node:
        """A number as a node; of the coefficients' dtype."""
        device = self._at.products[0].meta["val"].device
        return self._at.emit(aten.scalar_tensor.default, value, dtype=torch.float32, device=device)

    def same(self, node: fx.Node, a: Any, *_: Any) -> Value:
        """A cast, or an expansion: coefficients stay as precise as they are."""
        return a

    def exp(self, node: fx.Node, a: Any) -> Value:
        """exp of the logits shifted, or of a number a row."""
        if not isinstance(a, dict):
            linear = _linear(a)
            return self._again(node) if linear is None else Row(exponent=linear)
        return {Basis("p"): self.node(Row(exponent=_total(self._shift(a), {"lse": 1.0})))}

    def log(self, node: fx.Node, a: Any) -> Value:
        """log of a number a row."""
        if isinstance(a, Row) and a.exponent is not None:
            return Row(linear=a.exponent)
        return self._again(node)

    def tanh(self, node: fx.Node, a: Any) -> Value:
        """Of the scaled product, or of a number a row."""
        if not isinstance(a, dict):
            return self._again(node)
        scale = a.get(Basis("y"))
        if len(a) != 1 or not isinstance(scale, float):
            raise NotUnderstood("tanh of something other than the scaled product")
        return {Basis("tanh", scale): 1.0}

    def amax(self, node: fx.Node, a: Any, *_: Any) -> Value:
        """The largest logit, shifted."""
        return Row(linear=_total(self._shift(self._as_wide(a)), {"max": 1.0}))

    def sum(self, node: fx.Node, a: Any, *_: Any) -> Value:
        """Over the columns."""
        wide, width = self._as_wide(a), args_of(args_of(node)[0])[1][1]
        self._settle(wide)
        total: Any = 0.0
        for basis, c in wide.items():
            total = self._plus(total, self._times(c, self._row_sum(basis, width)))
        return Row(total, exponent=self._exponents.get(total))

    def _row_sum(self, basis: Basis, width: int) -> Any:
        if basis.slope or basis.kind == "tanh2":
            raise NotUnderstood("a sum of the gradient of capped logits")
        if basis.kind in ("y", "tanh"):
            return self._times(self._named["total"], 1 / self._outer(basis))
        return 1.0 if basis.kind != "one" else float(width)

    def gather(self, node: fx.Node, a: Any, dim: int, index: Any) -> Value:
        """One column a row."""
        wide = self._as_wide(a)
        self._settle(wide)
        self._picks(index)
        total: Any = 0.0
        for basis, c in wide.items():
            if basis.kind not in ("one", "y", "tanh") or basis.slope:
                raise NotUnderstood(f"one column a row is picked of {basis.kind}")
            picked = 1.0
            if basis.kind != "one":
                picked = self._times(self._named["picked"], 1 / self._outer(basis))
            total = self._plus(total, self._times(c, picked))
        return Row(total, linear={total: 1.0} if isinstance(total, fx.Node) else None)

    def scatter(self, node: fx.Node, into: Any, dim: int, index: Any, source: Any) -> Value:
        """A number a row in one of its columns, zeros in the others."""
        if self._as_wide(into):
            raise NotUnderstood("a scatter into something other than zeros")
        self._picks(index)
        value = source if not isinstance(source, dict) else source.get(Basis("one"))
        return {Basis("onehot"): self.node(value)}

    def _picks(self, index: Any) -> None:
        """Note whose column is meant; there is one a row."""
        node = self.node(index)
        leaf = node.meta.get("leaf") if isinstance(node, fx.Node) else None
        if leaf is None or leaf.kind != "rows":
            raise NotUnderstood("labels that are made of the logits")
        if self.index is not None and _which(leaf) != _which(self.index.meta["leaf"]):
            raise NotUnderstood("two different labels a row are picked")
        self.index = self.index or node

    # The logits themselves

    def _settle(self, wide: Wide) -> None:
        """Take ``wide`` for the logits if nothing yet says what they are."""
        for basis, c in wide.items():
            if self.form is None and basis.kind in ("y", "tanh"):
                self.form = self._form(basis, c)

    def _form(self, basis: Basis, c: Any) -> Form:
        if isinstance(c, fx.Node) or c <= 0 or basis.slope:
            raise NotUnderstood("logits whose scale is not a positive number")
        return basis.what, basis.kind == "tanh", c

    def _outer(self, basis: Basis) -> float:
        """What the product (or its tanh) is multiplied by to be the logits."""
        assert self.form is not None
        if self.form[:2] != (basis.what, basis.kind == "tanh"):
            raise NotUnderstood("the loss reads the logits before or after a scale or cap")
        return self.form[2]

    def _shift(self, wide: Wide) -> Linear:
        """``wide`` is the logits plus this."""
        logits = [(basis, c) for basis, c in wide.items() if basis.kind in ("y", "tanh")]
        if len(logits) != 1 or len(wide) > 2 or not {b.kind for b in wide} <= {"y", "tanh", "one"}:
            raise NotUnderstood("the logits are added to what is no number per row")
        form = self._form(*logits[0])
        if self.form not in (None, form):
            raise NotUnderstood("two losses read differently scaled logits")
        self.form = form
        rest = wide.get(Basis("one"))
        if rest is None:
            return {}
        if not isinstance(rest, fx.Node):
            raise NotUnderstood("the logits are shifted by a number")
        return self._linear_of(rest)

    def _coefficients(self, gradient: Wide) -> tuple[Any, Any, Any]:
        """A, B and C of the gradient A p + B onehot + C."""
        assert self.form is not None
        for basis in gradient:
            if basis.slope != self.form[1] or basis.kind not in ("p", "onehot", "one"):
                raise NotUnderstood(f"a gradient of the logits with {basis.kind} in it")
        a, b, c = (
            gradient.get(Basis(kind, slope=self.form[1]), 0.0) for kind in ("p", "onehot", "one")
        )
        return a, b, c

    def _result(self, node: fx.Node, fact: Fact) -> None:
        assert self.form is not None
        inner, cap, outer = self.form
        value = self._values[fact.value]
        if not isinstance(value, dict):
            self.rows[node] = self.node(value)
        elif value != {Basis("tanh" if cap else "y", inner): outer}:
            raise NotUnderstood("the caller gets another form of the logits than the loss reads")


def _check_readers(product: fx.Node, results: dict[fx.Node, Fact | Reader]) -> None:
    """The gradient is read by the product's own gradients only."""
    x, right = map(untranspose, product.args[-2:])  # type: ignore[arg-type]
    for result in results.values():
        if isinstance(result, Reader) and result.operand is not None:
            base, transposed = untranspose(result.operand)
            total = result.kind == "total"
            if (base, transposed != (result.flipped if total else True)) != (x if total else right):
                raise NotUnderstood("the logits' gradient is read by another product")


def _total(a: Linear, b: Linear, sign: float = 1.0) -> Linear:
    """a + sign * b; what cancels is gone."""
    total = dict(a)
    for quantity, factor in b.items():
        total[quantity] = total.get(quantity, 0.0) + sign * factor
    return {quantity: factor for quantity, factor in total.items() if factor}


def _which(leaf: Leaf) -> tuple[str, Any]:
    return signature(leaf.node), leaf.place.window


def _linear(value: Any) -> Linear | None:
    return value.linear if isinstance(value, Row) else None


RULES: dict[Any, Callable[..., Value]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), Softmax.add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), Softmax.add),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), Softmax.mul),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), Softmax.div),
    **dict.fromkeys((aten.scatter.value, aten.scatter.src), Softmax.scatter),
    aten.scatter_add.default: Softmax.scatter,
    aten.neg.default: Softmax.neg,
    aten.where.self: Softmax.where,
    aten._to_copy.default: Softmax.same,
    aten.expand.default: Softmax.same,
    aten.exp.default: Softmax.exp,
    aten.log.default: Softmax.log,
    aten.tanh.default: Softmax.tanh,
    aten.amax.default: Softmax.amax,
    aten.sum.dim_IntList: Softmax.sum,
    aten.gather.default: Softmax.gather,
}
