"""Joint graph -> heads: products whose wide results only feed a loss row by row. Read-only."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, made_of_tangents, module_path, untranspose
from hot_compile.passes.base.operators import MATRIX_PRODUCTS, is_pointwise
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.head.algebra import Basis, Expr, Wide, const, total_of
from hot_compile.passes.head.chunks import Chunks
from hot_compile.passes.head.operands import (
    FLAT,
    NotUnderstood,
    args_of,
    has_size,
    is_one,
    numel,
    picks_each_row,
    rank_of,
    same_size,
    shape_of,
)
from hot_compile.passes.head.reading import RULES, Reading

_PARTS = {
    aten.select.int,
    aten.index.Tensor,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The logits' gradient: A p + B onehot + C column + scale * extra (``reference/head.py``)."""

    a: Expr
    b: Expr
    c: Expr
    extra: fx.Node | None
    extra_scale: float


@dataclasses.dataclass(frozen=True)
class Head:
    """A product and its loss, as found in the joint graph."""

    name: str
    product: fx.Node
    x: fx.Node
    """[L, I]."""
    weight: fx.Node
    """[O, I], or [I, O] when ``weight_is_io``."""
    weight_is_io: bool
    bias: fx.Node | None
    """O numbers: the product's own, or what is added to it right behind."""
    reading: Reading
    coefficients: Coefficients
    grad_inputs: tuple[fx.Node, ...]
    grad_weights: tuple[fx.Node, ...]
    """[O, I], or [I, O] where the graph multiplies x^T g."""
    grad_biases: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    """What the caller gets of the logits."""

    @property
    def value(self) -> torch.Tensor:
        """The product's fake value [L, O]."""
        return self.product.meta["val"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """A product whose results any operators read row by row (``chunks.py``)."""

    name: str
    product: fx.Node
    chunks: Chunks

    @property
    def value(self) -> torch.Tensor:
        """The product's fake value [L, O]."""
        return self.product.meta["val"]

    @property
    def returned(self) -> bool:
        """The caller gets the logits."""
        return bool(self.chunks.at.returned)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A product that looks like a head and must stay, and why."""

    name: str
    product: fx.Node
    reason: str

    @property
    def value(self) -> torch.Tensor:
        """The product's fake value [L, O]."""
        return self.product.meta["val"]


def find_heads(graph: fx.Graph, least: int = 0) -> Iterator[Head | Rows | Refused]:
    """Every product whose results reach a log-softmax, in order; of ``least`` bytes or more.

    The graph may be changed between two of them.
    """
    gradients = made_of_tangents(graph)
    done: set[fx.Node] = set()
    for product in list(_candidates(graph, gradients, least)) if gradients else ():
        if product.users and product not in done:
            found = _found(product, module_path(product) or product.name)
            done |= set(found.chunks.at.products) if isinstance(found, Rows) else {product}
            yield found


def _found(product: fx.Node, name: str) -> Head | Rows | Refused:
    try:
        return _head(product, name)
    except NotUnderstood:
        pass
    try:
        return Rows(name, product, Chunks(product))
    except NotUnderstood as refusal:
        return Refused(name, product, str(refusal))


def _candidates(graph: fx.Graph, gradients: set[fx.Node], least: int) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.target not in MATRIX_PRODUCTS or node in gradients:
            continue
        if bytes_of(node.meta["val"]) >= least and _reaches_softmax(node):
            yield node


def _reaches_softmax(product: fx.Node) -> bool:
    """The largest of its columns is asked for, or of something elementwise made of some of it.

    That need not be something that can be left out: what cannot has a reason to tell.
    """
    seen, stack = {product}, [product]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target is aten.amax.default and _reduces_columns(user, product):
                return True
            followed = user.target in RULES or user.target in _PARTS or is_pointwise(user)
            if user not in seen and followed and _is_wide(user, product):
                seen.add(user)
                stack.append(user)
    return False


def _reduces_columns(amax: fx.Node, product: fx.Node) -> bool:
    """Most of the product's columns are reduced, rather than its rows or a layer's channels."""
    shape = shape_of(args_of(amax)[0])
    sizes = [shape[dim] for dim in args_of(amax)[1] or range(len(shape))]
    return any(2 * hint(size) > hint(shape_of(product)[1]) for size in sizes)


def _is_wide(node: fx.Node, product: fx.Node) -> bool:
    """As wide as the product, or most of it, or parts of it."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    return has_size(node, shape_of(product)[1]) or 2 * numel(node) > numel(product)


def _head(product: fx.Node, name: str) -> Head:
    if product.meta["val"].dtype not in _FLOATS:
        raise NotUnderstood(f"a product of {product.meta['val'].dtype}")
    for node in product.graph.nodes:  # sizes found to be equal must be so before they are read
        if node.target is aten.gather.default and has_size(args_of(node)[0], shape_of(product)[1]):
            picks_each_row(node, args_of(node)[1] % rank_of(node))
    bias, x, right = _operands(product)
    logits, bias = _with_bias(product) if bias is None else (product, bias)
    reading = Reading(product, logits)
    base, transposed = untranspose(right)
    readers = _Readers(x, base, transposed, reading)
    return Head(
        name=name,
        product=product,
        x=x,
        weight=base,
        weight_is_io=not transposed,
        bias=bias,
        reading=reading,
        coefficients=_coefficients(reading, readers.gradient),
        grad_inputs=tuple(readers.inputs),
        grad_weights=tuple(readers.weights),
        grad_biases=tuple(readers.biases),
        returned=_returned(reading),
    )


def _operands(product: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    if product.target is aten.mm.default:
        return (None, *product.args)  # type: ignore[return-value]
    if product.kwargs:
        raise NotUnderstood("addmm with alpha or beta")
    bias, x, right = product.args
    if len(shape_of(bias)) != 1:
        raise NotUnderstood("what is added to the product is not a bias")
    return bias, x, right  # type: ignore[return-value]


def _with_bias(product: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(the product with what is added to it right behind, that bias), as in Hugging Face's BART."""
    node, outputs = product, shape_of(product)[1]
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten.add.Tensor and not node.kwargs:
            for bias in args_of(node):
                if isinstance(bias, fx.Node) and _is_column(bias, outputs):
                    return node, bias
        if node.target not in FLAT or not same_size(shape_of(node)[-1], outputs):
            break
    return product, None


def _is_column(node: fx.Node, outputs: Any) -> bool:
    shape = shape_of(node)
    return bool(shape) and same_size(shape[-1], outputs) and all(map(is_one, shape[:-1]))


class _Readers:
    """The nodes that read the gradient of the product, by what they make of it."""

    def __init__(self, x: fx.Node, weight: fx.Node, transposed: bool, reading: Reading) -> None:
        self.inputs: list[fx.Node] = []
        self.weights: list[fx.Node] = []
        self.biases: list[fx.Node] = []
        self._x, self._weight = untranspose(x), (weight, not transposed)
        gradients = {found.terms for found in reading.readers.values()}
        if len(gradients) != 1 or any(found.window for found in reading.readers.values()):
            raise NotUnderstood("products read different gradients of the logits")
        self.gradient = next(iter(reading.readers.values()))
        for node in reading.readers:
            self._kind(node, reading.wide).append(node)

    def _kind(self, node: fx.Node, wide: dict[fx.Node, Wide]) -> list[fx.Node]:
        if node.target is aten.sum.dim_IntList:
            return self.biases
        if node.target is aten.mm.default:
            a, b = args_of(node)
            if a in wide and b not in wide:
                if wide[a].axis == 1 and untranspose(b) == self._weight:
                    return self.inputs
                if wide[a].axis == 0 and untranspose(b) == self._x:
                    return self.weights
            elif b in wide and a not in wide and wide[b].axis == 1:
                base, flip = untranspose(a)
                if (base, not flip) == self._x:
                    return self.weights
        raise NotUnderstood("the logits, or their gradient, are read by another product")


def _coefficients(reading: Reading, gradient: Wide) -> Coefficients:
    """Sort the gradient's terms; ``reading.column`` becomes the one that the operators take."""
    cap = reading.form is not None and reading.form[1]
    parts: dict[str, list[Expr]] = {}
    column: fx.Node | None = None
    extra, scale = None, 0.0
    for term in gradient.terms:
        kind, what = term.basis.kind, term.basis.what
        if term.slope != cap or kind not in ("p", "onehot", "one", "column", "extra"):
            raise NotUnderstood(f"a gradient of the logits with {kind} in it")
        if kind == "extra":
            constant = term.coefficient.constant
            if constant is None or extra is not None:
                raise NotUnderstood("gradients from outside that are scaled by row")
            extra, scale = what, constant
            continue
        column = what if kind == "column" else column
        parts.setdefault(kind, []).append(term.coefficient)
    _fix_column(reading, column, "one" in parts)
    uniform = parts.get("one", []) + parts.get("column", [])
    return Coefficients(
        total_of(parts.get("p", [])),
        total_of(parts.get("onehot", [])),
        total_of(uniform),
        extra,
        scale,
    )


def _fix_column(reading: Reading, column: fx.Node | None, uniform: bool) -> None:
    """The operators weight both the sum of z and the gradient's uniform part by one column."""
    own = reading.column if reading.needs_total else column
    clash = (column is not None and (uniform or own is not column)) or (uniform and own is not None)
    if clash:
        raise NotUnderstood("columns are weighted in two ways")
    reading.column = own


def _returned(reading: Reading) -> tuple[fx.Node, ...]:
    """The wide outputs, if all of them are the logits and as contiguous as the operators write."""
    assert reading.form is not None
    inner, cap, outer = reading.form
    basis = Basis("tanh", inner) if cap else Basis("y")
    for node in reading.returned:
        found = reading.wide[node]
        whole = found.axis == len(shape_of(node)) - 1 and not found.window
        same = [(t.basis, t.coefficient, t.slope) for t in found.terms] == [
            (basis, const(outer), False)
        ]
        if not (whole and same and node.meta["val"].is_contiguous()):
            raise NotUnderstood("the caller gets another form of the logits than the loss reads")
        if node.meta["val"].dtype != reading.returned[0].meta["val"].dtype:
            raise NotUnderstood("the caller gets the logits in two dtypes")
    return tuple(reading.returned)
