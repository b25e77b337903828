"""Joint graph -> heads: products whose wide results are only read row by row. Read-only."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, made_of_tangents, module_path, strip
from hot_compile.passes.base.operators import CASTS, MATRIX_PRODUCTS, VIEWS, is_pointwise
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.head.chunks import Chunks
from hot_compile.passes.head.operands import NotUnderstood, args_of, has_size, numel, shape_of
from hot_compile.passes.head.rules import REDUCTIONS, RULES
from hot_compile.passes.head.softmax import Softmax

_PARTS = {aten.index.Tensor, operator.getitem}
_WIDER = 4
"""An MLP's hidden layer is this much wider than what it reads."""
_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of products whose softmax has operators of its own."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A product, what reads its results, and what of that can be done by chunks."""

    name: str
    product: fx.Node
    chunks: Chunks
    softmax: Softmax | None
    """What all that is, if it is a loss of one softmax."""

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


def find_heads(graph: fx.Graph, least: int = 0) -> Iterator[Head | Refused]:
    """Every product of ``least`` bytes whose results reach a softmax, or only sums, in order.

    The graph may be changed between two of them.
    """
    gradients = made_of_tangents(graph)
    done: set[fx.Node] = set()
    for product in list(candidates(graph, gradients, least)):
        if product.users and product not in done:
            found = _found(product, module_path(product) or product.name)
            done |= set(found.chunks.at.products) if isinstance(found, Head) else {product}
            yield found


def _found(product: fx.Node, name: str) -> Head | Refused:
    try:
        chunks = Chunks(product)
    except NotUnderstood as refusal:
        return Refused(name, product, str(refusal))
    try:
        known = product.meta["val"].dtype in _KERNELS
        softmax = Softmax(chunks.at, chunks.results) if known else None
    except NotUnderstood:
        softmax = None
    return Head(name, product, chunks, softmax)


def candidates(graph: fx.Graph, gradients: set[fx.Node], least: int) -> Iterator[fx.Node]:
    """Products of ``least`` bytes or more that look like a head's."""
    for node in graph.nodes if gradients else ():
        if node.target not in MATRIX_PRODUCTS or node in gradients:
            continue
        if bytes_of(node.meta["val"]) >= least and _is_read_by_rows(node, gradients):
            yield node


def _is_read_by_rows(product: fx.Node, gradients: set[fx.Node]) -> bool:
    """The largest of its columns is asked for, or of something elementwise made of some of it.

    Or it is a wide layer's, and all that is made of it is reduced over its columns. That need not
    be something that can be left out: what cannot has a reason to tell.
    """
    seen, stack, reduced, goes_on = {product}, [product], False, not _is_wider(product)
    while stack:
        node = stack.pop()
        for user in node.users:
            reduces = user.target in REDUCTIONS and _reduces_columns(user, product)
            if reduces and user.target is aten.amax.default:
                return True
            followed = user.target in RULES or user.target in _PARTS or is_pointwise(user)
            if user not in seen and followed and _is_wide(user, product):
                seen.add(user)
                stack.append(user)
            elif user not in gradients:
                reduced |= reduces
                goes_on |= not followed and user.target is not aten.sym_size.int
    return reduced and not goes_on


def _is_wider(product: fx.Node) -> bool:
    """A layer whose results are wider than those of others."""
    weight = strip(args_of(product)[-1], VIEWS | CASTS)
    inputs, outputs = map(hint, shape_of(args_of(product)[-1]))
    return weight.op == "placeholder" and outputs > _WIDER * inputs


def _reduces_columns(node: fx.Node, product: fx.Node) -> bool:
    """Most of the product's columns are reduced, rather than its rows or a layer's channels."""
    shape, dims = shape_of(args_of(node)[0]), (*args_of(node)[1:2], None)[0]
    dims = [dims] if isinstance(dims, int) else dims or range(len(shape))
    sizes = [shape[dim] for dim in dims]
    return any(2 * hint(size) > hint(shape_of(product)[1]) for size in sizes)


def _is_wide(node: fx.Node, product: fx.Node) -> bool:
    """As wide as the product, or most of it, or parts of it."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    return has_size(node, shape_of(product)[1]) or 2 * numel(node) > numel(product)
