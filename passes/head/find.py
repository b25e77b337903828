"""Joint graph -> heads: products whose wide results are only read row by row. Read-only."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, made_of_tangents, module_path
from hot_compile.passes.base.operators import MATRIX_PRODUCTS, is_pointwise
from hot_compile.passes.base.site import bytes_of, hint
from hot_compile.passes.head.chunks import Chunks
from hot_compile.passes.head.operands import NotUnderstood, args_of, has_size, numel, shape_of
from hot_compile.passes.head.rules import RULES
from hot_compile.passes.head.softmax import Softmax

_PARTS = {aten.index.Tensor, operator.getitem}
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
    """Every product whose results reach a log-softmax, in order; of ``least`` bytes or more.

    The graph may be changed between two of them.
    """
    gradients = made_of_tangents(graph)
    done: set[fx.Node] = set()
    for product in list(_candidates(graph, gradients, least)) if gradients else ():
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
