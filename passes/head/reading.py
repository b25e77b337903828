"""Follows the logits of a product through the joint graph and says what readers make of them.

An abstract interpretation: each node as wide as the vocabulary becomes a ``Wide``. Read-only. What
is not understood raises ``NotUnderstood`` with the reason, and the head is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from hot_compile.passes.base.graph import aten, is_tangent, strip
from hot_compile.passes.base.operators import (
    ADDITIVE,
    CASTS,
    MATRIX_PRODUCTS,
    SCALED,
    TRANSPOSES,
    VIEWS,
)
from hot_compile.passes.base.site import hint
from hot_compile.passes.head.algebra import (
    LSE,
    MAX,
    MINUS,
    ONE,
    Basis,
    Cut,
    Expr,
    Index,
    Linear,
    Term,
    Wide,
    Window,
    const,
    exp,
    total_of,
)
from hot_compile.passes.head.operands import (
    COPIES,
    FLAT,
    NotUnderstood,
    Shape,
    apart,
    args_of,
    column_of,
    count,
    cut_of,
    is_one,
    is_zero,
    numel,
    picks_each_row,
    rank_of,
    same_size,
    selected,
    shape_of,
    signature,
    times,
    without,
)
from hot_compile.passes.head.sizes import minus, size_of


class Reading:
    """What becomes of the product ``y`` [L, O]; made by following it through its graph.

    Args:
        product: of the graph.
        logits: y as it is read, its columns last: the product, or that with a bias.
    """

    def __init__(self, product: fx.Node, logits: fx.Node) -> None:
        self.product = product
        self.rows, self.outputs = shape_of(product)
        y = Wide((Term(Basis("y"), ONE),), rank_of(logits) - 1)
        self.wide: dict[fx.Node, Wide] = {logits: y}
        self.results: dict[fx.Node, Expr] = {}
        """Row quantities that are read off the logits, and what they are."""
        self.windows: dict[fx.Node, Window] = {}
        """Of which rows each of them is."""
        self.readers: dict[fx.Node, Wide] = {}
        """Products and column sums that read the gradient of y."""
        self.returned: list[fx.Node] = []
        self.sizes: list[fx.Node] = []
        """Nodes that only ask how long something wide is."""
        self.form: tuple[float, bool, float] | None = None
        self.picks: list[tuple[Index, Window]] = []
        """Of which columns one a row is picked: of all rows, or of rows that lie apart."""
        self.column: fx.Node | None = None
        """By which z is weighted in the fourth statistic."""
        self.needs_total = False
        known = 0
        while known != len(self.wide):  # what is met on the way has readers before that place
            known = len(self.wide)
            for node in product.graph.nodes:
                self._visit(node)
        if self.form is None:
            raise NotUnderstood("no log-softmax reads it")
        if not self.readers:
            raise NotUnderstood("no gradient of it is asked for")

    def _visit(self, node: fx.Node) -> None:
        read = [n for n in node.all_input_nodes if n in self.wide]
        if not read or node in self.wide or node in self.results or node in self.readers:
            return
        if node.op == "output":
            self.returned = read
        elif node.target is aten.sym_size.int:
            self.sizes += [] if node in self.sizes else [node]
        elif node.users:
            self._understand(node, self.wide[read[0]])

    def _understand(self, node: fx.Node, like: Wide) -> None:
        """Note what ``node`` is; ``like``: one of the wide tensors it reads."""
        if node.target in MATRIX_PRODUCTS:
            self.readers[node] = like
            return
        self.windows[node] = like.window
        if node.target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            self._reduce(node, like)
            return
        if node.target is aten.gather.default and args_of(node)[0] in self.wide:
            self.results[node] = self._gathered(node, like)
            return
        self.wide[node] = self._wide(node, like)

    def _wide(self, node: fx.Node, like: Wide) -> Wide:
        """``node``, which is as wide as the logits, its columns and rows as those of ``like``."""
        rule = RULES.get(node.target)
        if rule is not None:
            return rule(self, node, like)
        if any(n in self.wide for n in node.all_input_nodes):
            raise NotUnderstood(f"the logits are also read by {_name(node)}")
        if node.target in MATRIX_PRODUCTS:
            raise NotUnderstood("the logits are the sum of several products (LoRA on the head?)")
        raise NotUnderstood("the logits meet another tensor of their size, such as a teacher's")

    # Operands

    def _operand(self, arg: Any, shape: Shape, like: Wide) -> Wide | Expr:
        """``arg`` as it meets a wide tensor of ``shape``: wide itself, or a number per row."""
        if not isinstance(arg, fx.Node):
            return const(arg)
        if arg.target is aten.scalar_tensor.default:
            return const(args_of(arg)[0])
        if arg in self.wide:
            found = self.wide[arg]
            if (found.axis, found.window) != (like.axis, like.window) or len(shape) != rank_of(arg):
                raise NotUnderstood("logits of different rows are combined")
            return found
        padded = (1,) * (len(shape) - rank_of(arg)) + shape_of(arg)
        if is_one(padded[like.axis]):
            return Expr("rows", (arg, without(shape, like.axis)))
        if all(is_one(n) for place, n in enumerate(padded) if place != like.axis):
            factor, column = column_of(arg)
            return Wide((Term(Basis("column", column), factor),), like.axis, like.window)
        if is_tangent(strip(arg, VIEWS | CASTS)):
            if like.axis != len(shape) - 1 or like.window:
                raise NotUnderstood("gradients from outside meet some of the logits only")
            return Wide((Term(Basis("extra", arg), ONE),), like.axis)
        self.wide[arg] = self._wide(arg, like)
        return self.wide[arg]

    def _as_wide(self, arg: Any, shape: Shape, like: Wide) -> Wide:
        found = self._operand(arg, shape, like)
        if isinstance(found, Wide):
            return found
        terms = () if found.constant == 0 else (Term(Basis("one"), found),)
        return Wide(terms, like.axis, like.window)

    def _index(self, node: fx.Node, shape: Shape, like: Wide) -> Index:
        found = Index(signature(node), node, without(shape, like.axis))
        if numel(node) != count(found.shape):
            raise NotUnderstood("more than one column a row is picked")
        if (found, like.window) not in self.picks:
            if not all(apart(like.window, window) for _, window in self.picks):
                raise NotUnderstood("two different labels a row are picked")
            self.picks.append((found, like.window))
        return found

    # Elementwise rules

    def _alike(self, node: fx.Node, like: Wide) -> Wide:
        return self._as_wide(args_of(node)[0], shape_of(node), like)

    def _reshape(self, node: fx.Node, like: Wide) -> Wide:
        source: fx.Node = args_of(node)[0]
        before, after = shape_of(source), shape_of(node)
        if source not in self.wide:  # reached from its result
            axis = self._moved(after, like.axis, before)
            self.wide[source] = self._wide(source, Wide((), axis, like.window))
        found = self.wide[source]
        return Wide(found.terms, self._moved(before, found.axis, after), found.window)

    def _moved(self, before: Shape, axis: int, after: Shape) -> int:
        """Where a view puts the vocabulary's dimension."""
        lead = math.prod(map(hint, before[:axis]))
        for place, size in enumerate(after):
            if same_size(size, self.outputs) and math.prod(map(hint, after[:place])) == lead:
                return place
        raise NotUnderstood("a view splits the vocabulary")

    def _permute(self, node: fx.Node, like: Wide) -> Wide:
        found = self._source(node)
        if node.target is aten.transpose.int or node.target is aten.t.default:
            order = list(range(rank_of(node)))
            a, b = (0, 1) if node.target is aten.t.default else args_of(node)[1:]
            order[a], order[b] = order[b], order[a]
        else:
            order = [n % rank_of(node) for n in args_of(node)[1]]
        axis = order.index(found.axis)
        if sorted(rest := order[:axis] + order[axis + 1 :]) != rest:
            raise NotUnderstood("rows of the logits change their order")
        return Wide(found.terms, axis, found.window)

    def _source(self, node: fx.Node) -> Wide:
        """The first operand of a node that is only reached through it."""
        if args_of(node)[0] not in self.wide:
            raise NotUnderstood("the logits meet another tensor of their size, such as a teacher's")
        return self.wide[args_of(node)[0]]

    def _expand(self, node: fx.Node, like: Wide) -> Wide:
        return self._as_wide(args_of(node)[0], shape_of(node), like)

    def _full(self, node: fx.Node, like: Wide) -> Wide:
        value = const(args_of(node)[1])
        terms = () if value.constant == 0 else (Term(Basis("one"), value),)
        return Wide(terms, like.axis, like.window)

    def _add(self, node: fx.Node, like: Wide) -> Wide:
        if node.kwargs.get("alpha", 1) != 1 or len(args_of(node)) > 2:
            raise NotUnderstood("a sum with alpha reads the logits")
        a, b = (self._as_wide(arg, shape_of(node), like) for arg in args_of(node))
        minus = node.target in (aten.sub.Tensor, aten.sub.Scalar)
        return a.plus(b.scaled(MINUS) if minus else b)

    def _neg(self, node: fx.Node, like: Wide) -> Wide:
        return self._as_wide(args_of(node)[0], shape_of(node), like).scaled(MINUS)

    def _mul(self, node: fx.Node, like: Wide) -> Wide:
        a, b = (self._operand(arg, shape_of(node), like) for arg in args_of(node)[:2])
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            if isinstance(b, Wide) or len(args_of(node)) > 2 or node.kwargs:
                raise NotUnderstood("something is divided by the logits")
            b = const(1 / b.constant) if b.constant else Expr("inverse", (b,))
        if isinstance(a, Wide) and isinstance(b, Wide):
            return times(a, b) or times(b, a) or _refuse("logits are multiplied with each other")
        if isinstance(b, Wide):
            return b.scaled(a)  # type: ignore[arg-type]
        if isinstance(a, Wide):
            return a.scaled(b)
        raise NotUnderstood("numbers per row and per column are combined")

    def _where(self, node: fx.Node, like: Wide) -> Wide:
        shape = shape_of(node)
        condition = self._operand(args_of(node)[0], shape, like)
        if isinstance(condition, Wide) or condition.op != "rows":
            raise NotUnderstood("a mask hides some of the logits of a row")
        a, b = (self._as_wide(arg, shape, like) for arg in args_of(node)[1:])
        zero = const(0)
        yes = a.mapped(lambda c: Expr("where", (*condition.args, c, zero)))
        return yes.plus(b.mapped(lambda c: Expr("where", (*condition.args, zero, c))))

    def _tanh(self, node: fx.Node, like: Wide) -> Wide:
        like = self._source(node)
        (term,) = like.terms if len(like.terms) == 1 else (None,)
        if term is None or term.basis.kind != "y" or term.coefficient.constant is None:
            raise NotUnderstood("tanh of something other than the scaled product")
        basis = Basis("tanh", term.coefficient.constant)
        return Wide((Term(basis, ONE),), like.axis, like.window)

    def _exp(self, node: fx.Node, like: Wide) -> Wide:
        shift = self._shift(self._source(node))
        return Wide((Term(Basis("p"), exp(LSE.plus(shift))),), like.axis, like.window)

    def _scatter(self, node: fx.Node, like: Wide) -> Wide:
        into, dim, index, source = args_of(node)[:4]
        shape = shape_of(node)
        if not is_zero(into) or dim % len(shape) != like.axis or node.kwargs:
            raise NotUnderstood("a scatter into something other than zeros")
        found = self._index(index, shape, like)
        value = self._operand(source, shape, like)
        if isinstance(value, Wide):
            raise NotUnderstood("more than one column a row is scattered")
        return Wide((Term(Basis("onehot", found), value),), like.axis, like.window)

    # Some of the rows

    def _slice(self, node: fx.Node, like: Wide) -> Wide:
        found = self._source(node)
        cut = cut_of(node, shape_of(args_of(node)[0]), found.axis)
        return Wide(found.terms, found.axis, (*found.window, cut) if cut else found.window)

    def _slice_scatter(self, node: fx.Node, like: Wide) -> Wide:
        into, source = args_of(node)[:2]
        if not is_zero(into) or source not in self.wide:
            raise NotUnderstood("a slice is put into something other than zeros")
        cut = cut_of(node, shape_of(node), like.axis)
        return self._widened(self.wide[source], cut)

    def _select(self, node: fx.Node, like: Wide) -> Wide:
        found = self._source(node)
        cut = selected(node, shape_of(args_of(node)[0]), found.axis)
        return Wide(found.terms, found.axis - (cut.dim < found.axis), (*found.window, cut))

    def _select_scatter(self, node: fx.Node, like: Wide) -> Wide:
        into, source = args_of(node)[:2]
        if not is_zero(into) or source not in self.wide:
            raise NotUnderstood("a row is put into something other than zeros")
        found = self.wide[source]
        axis = found.axis + (args_of(node)[2] % rank_of(node) <= found.axis)
        found = self._widened(found, selected(node, shape_of(node), axis))
        return Wide(found.terms, axis, found.window)

    def _pad(self, node: fx.Node, like: Wide) -> Wide:
        pads, value = list(args_of(node)[1]), args_of(node)[2] if len(args_of(node)) > 2 else 0
        found, shape = self._source(node), shape_of(node)
        for place in range(0, len(pads), 2):
            dim, (before, after) = len(shape) - 1 - place // 2, pads[place : place + 2]
            if not before and not after:
                continue
            if value != 0 or dim == like.axis:
                raise NotUnderstood("padding of the vocabulary, or by something other than zero")
            lead, stop = dim - (dim > like.axis), minus(size_of(shape[dim]), size_of(after))
            cut = Cut(without(shape, like.axis, drop=True), lead, size_of(before), stop)
            found = self._widened(found, cut)
        return found

    def _widened(self, found: Wide, cut: Cut | None) -> Wide:
        """``found`` with zeros for the rows that ``cut`` had left out."""
        if cut is None:
            return found
        if not found.window or found.window[-1] != cut:
            raise NotUnderstood("rows are put back elsewhere than they were taken from")
        terms = found.mapped(lambda c: Expr("widen", (c, cut))).terms
        return Wide(terms, found.axis, found.window[:-1])

    # Reductions

    def _reduce(self, node: fx.Node, like: Wide) -> None:
        rank = len(shape_of(args_of(node)[0]))
        dims = {d % rank for d in args_of(node)[1] or range(rank)}
        if dims == {like.axis}:
            if node.target is aten.amax.default:
                self.results[node] = Expr("linear", (MAX.plus(self._shift(like)),))
            else:
                mean = node.target is aten.mean.dim
                self.results[node] = self._summed(like) * const(1 / self.outputs if mean else 1)
        elif node.target is aten.sum.dim_IntList and dims == set(range(rank)) - {like.axis}:
            self.readers[node] = like
        else:
            raise NotUnderstood("the logits are also reduced over more than the vocabulary")

    def _summed(self, found: Wide) -> Expr:
        self._settle(found)
        return total_of(self._row_sum(term) * term.coefficient for term in found.terms)

    def _row_sum(self, term: Term) -> Expr:
        kind, what = term.basis.kind, term.basis.what
        if term.slope:
            raise NotUnderstood("the gradient of capped logits is summed over the vocabulary")
        if kind in ("p", "onehot"):
            return ONE
        if kind == "one":
            return const(self.outputs)
        if kind == "column":
            return Expr("column_sum", (what,))
        basis, column = what if kind == "weighted" else (term.basis, None)
        if basis.kind not in ("y", "tanh") or (self.needs_total and self.column is not column):
            raise NotUnderstood(f"a sum over the vocabulary of {kind}")
        self.needs_total, self.column = True, column
        return Expr("total") * const(1 / self._outer(basis))

    def _gathered(self, node: fx.Node, like: Wide) -> Expr:
        if args_of(node)[1] % rank_of(node) != like.axis:
            raise NotUnderstood("rows of the logits are gathered")
        if not picks_each_row(node, like.axis):
            raise NotUnderstood("one column is picked of some of the rows")
        index = self._index(args_of(node)[2], shape_of(node), like)
        self._settle(like)
        return total_of(self._picked(term, index) * term.coefficient for term in like.terms)

    def _picked(self, term: Term, index: Index) -> Expr:
        kind, what = term.basis.kind, term.basis.what
        if kind == "one":
            return ONE
        if kind == "column":
            return Expr("take", (what, index))
        basis, factor = term.basis, ONE
        if kind == "weighted":
            basis, factor = what[0], Expr("take", (what[1], index))
        if basis.kind not in ("y", "tanh") or term.slope:
            raise NotUnderstood(f"one column a row is picked of {kind}")
        return Expr("picked", (index,)) * const(1 / self._outer(basis)) * factor

    # The logits themselves

    def _outer(self, basis: Basis) -> float:
        """What the product (or its tanh) is multiplied by to be the logits."""
        assert self.form is not None
        inner, cap, outer = self.form
        if (cap, inner) != (basis.kind == "tanh", basis.what or 1.0):
            raise NotUnderstood("the loss reads the logits before or after a scale or cap")
        return outer

    def _settle(self, found: Wide) -> None:
        """Take ``found`` for the logits if nothing that was read yet says what they are."""
        for term in found.terms:
            if self.form is None and term.basis.kind in ("y", "tanh"):
                self.form = self._form(term)

    def _form(self, term: Term) -> tuple[float, bool, float]:
        outer = term.coefficient.constant
        if outer is None or outer <= 0 or term.slope:
            raise NotUnderstood("logits whose scale is not a positive number")
        return term.basis.what or 1.0, term.basis.kind == "tanh", outer

    def _shift(self, found: Wide) -> Linear:
        """``found`` is the logits plus this; fixes what "the logits" are when first asked."""
        logit = [t for t in found.terms if t.basis.kind in ("y", "tanh")]
        rest = [t for t in found.terms if t.basis.kind == "one"]
        if len(logit) != 1 or len(rest) + 1 != len(found.terms):
            raise NotUnderstood("the logits are added to what is no number per row")
        form = self._form(logit[0])
        if self.form not in (None, form):
            raise NotUnderstood("two losses read differently scaled logits")
        self.form = form
        shift = Linear()
        for term in rest:
            shift = shift.plus(self._linear(term.coefficient))
        return shift

    def _linear(self, expr: Expr) -> Linear:
        """``expr`` as a sum of quantities that we may know to cancel."""
        if expr.op == "rows":
            meaning = self.meaning(expr.args[0])
            return meaning if isinstance(meaning, Linear) else Linear(((expr, 1.0),))
        if expr.op == "linear":
            return expr.args[0]
        if expr.op == "add":
            return self._linear(expr.args[0]).plus(self._linear(expr.args[1]))
        if expr.op == "mul" and expr.args[0].constant is not None:
            return Linear().plus(self._linear(expr.args[1]), expr.args[0].constant)
        raise NotUnderstood(
            "an exponential of logits shifted by something else than a row's number"
        )

    def meaning(self, node: fx.Node) -> Linear | Expr:
        """What a node of one number a row is, in terms of the statistics if it is made of them."""
        while node.target in FLAT and node not in self.results:
            node = args_of(node)[0]
        if node in self.results:
            found = self.results[node]
            return found.args[0] if found.op == "linear" else found
        if node.target is aten.log.default:
            inside = self.meaning(args_of(node)[0])
            if isinstance(inside, Expr) and inside.op == "exp":
                return inside.args[0]
        operands = [a for a in args_of(node) if isinstance(a, fx.Node)]
        plain = node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs
        if plain and [numel(n) for n in operands] == [numel(node)] * 2:
            a, b = (self.meaning(n) for n in operands)
            if isinstance(a, Linear) and isinstance(b, Linear):
                return a.plus(b, 1.0 if node.target is aten.add.Tensor else -1.0)
        return Linear(((Expr("rows", (node, None)), 1.0),))


RULES: dict[Any, Callable[[Reading, fx.Node, Wide], Wide]] = {
    **dict.fromkeys(FLAT, Reading._reshape),
    **dict.fromkeys(COPIES, Reading._alike),
    **dict.fromkeys(TRANSPOSES, Reading._permute),
    **dict.fromkeys(ADDITIVE, Reading._add),
    **dict.fromkeys(SCALED, Reading._mul),
    **dict.fromkeys(
        (aten.scatter.value, aten.scatter.src, aten.scatter_add.default), Reading._scatter
    ),
    aten.expand.default: Reading._expand,
    aten.full.default: Reading._full,
    aten.neg.default: Reading._neg,
    aten.where.self: Reading._where,
    aten.tanh.default: Reading._tanh,
    aten.exp.default: Reading._exp,
    aten.slice.Tensor: Reading._slice,
    aten.slice_scatter.default: Reading._slice_scatter,
    aten.select.int: Reading._select,
    aten.select_scatter.default: Reading._select_scatter,
    aten.constant_pad_nd.default: Reading._pad,
}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def _refuse(why: str) -> Wide:
    raise NotUnderstood(why)
