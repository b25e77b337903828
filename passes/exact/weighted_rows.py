"""Joint graph -> the same with the gradient of rows' weights from what is narrower, and there.

Experts' rows are weighted by what a router gave them: y = w (h B). So w's gradient is the sum of
g (h B) along a row, which keeps every expert's result for the backward. It is as well the sum of
(g B^T) h, and g B^T, times w, is the gradient of h. So nothing but h is read, which the product's
own gradients keep in any case, and w comes in behind a product instead of before it (SonicMoE has
it for its kernels, arXiv 2512.14080). The sums are of other terms, each rounded as often as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, is_zeros, untranspose, value_of
from hot_compile.passes.base.operators import CASTS, GROUPED_PRODUCTS

_FLOATS = {torch.bfloat16, torch.float32}
"""Of float16 a gradient might leave its range where its weight is not applied to it yet."""
_SWAP, _TRANSPOSE = [0, 2, 1], [1, 0]


@dataclasses.dataclass(frozen=True)
class _Weighted:
    """A product whose rows are weighted, and the backward of both."""

    product: fx.Node
    """[rows, out] = [rows, inner] x [groups, inner, out]."""
    weight: fx.Node
    """[rows, 1]."""
    grad_output: fx.Node
    """Of the weighted rows."""
    grad_weight: fx.Node
    """The sum along rows."""
    masks: list[fx.Node]
    """Rows that belong to no group, each [rows, 1]: what a product makes of them is nobody's."""
    scaled: list[fx.Node]
    """``grad_output`` times ``weight``, cast and masked: the last is what the products read."""
    grad_input: fx.Node
    """The product that gives h's gradient."""
    grad_matrices: fx.Node
    """The one that gives the matrices'."""

    def unscaled(self, emit: Emitter) -> fx.Node:
        """``grad_output``, cast and masked as it is where it is scaled."""
        value = self.grad_output
        for node in self.scaled[1:]:
            if _is_mask(node):
                value = emit(aten.where.self, node.args[0], emit.constant(0.0, value), value)
            else:
                value = emit.cast(value, value_of(node).dtype)
        return emit.cast(value, value_of(self.scaled[-1]).dtype)

    def summed(self, emit: Emitter, before: fx.Node) -> fx.Node:
        """The weights' gradient; ``before``: h's, as it is without them."""
        h: Any = self.product.args[0]
        single = [emit.cast(node, torch.float32) for node in (before, h)]
        sums = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, *single), [1], True)
        for mask in self.masks:
            sums = emit(aten.where.self, mask, emit.constant(0.0, sums), sums)
        wanted = value_of(self.grad_weight)
        sums = emit.cast(sums, wanted.dtype)
        return sums if wanted.dim() == 2 else emit(aten.squeeze.dim, sums, 1)

    def multiplied(self, emit: Emitter, grad_output: fx.Node, weighted: fx.Node) -> fx.Node:
        """The matrices' gradient; ``weighted``: h times the weights."""
        new = {self.scaled[-1]: grad_output, self.product.args[0]: weighted}
        operands = []
        given: Any = self.grad_matrices.args
        for old in given[:2]:
            base, transposed = untranspose(old)
            operands.append(emit.permute(new[base], _TRANSPOSE if transposed else [0, 1]))
        return emit(self.grad_matrices.target, *operands, *self.grad_matrices.args[2:])


def applies(product: fx.Node) -> bool:
    """A product in groups whose rows are weighted, and nothing else is made of them.

    Of rows that are wider than what is made of them, more would be read.
    """
    sizes = (*value_of(product.args[0]).shape, *value_of(product).shape)
    if not all(isinstance(size, int) for size in sizes):
        return False
    return sizes[1] <= sizes[-1] and _weighted(product) is not None


def saves(product: fx.Node) -> float:
    """Seconds an element of h."""
    return 1e-12


def replace(graph: fx.Graph, product: fx.Node) -> bool:
    """Take the weights' gradient from h and from h's gradient."""
    found = _weighted(product)
    if found is None:
        return False
    args: Any = product.args
    h, matrices, ends = args
    # what is made of h and weights alone is for the backward to make, too
    emit = Emitter(graph, found.grad_output.next, found.grad_input, stays=True)
    grad_output = found.unscaled(emit)
    transposed = emit.permute(matrices, _SWAP)
    before = emit(product.target, grad_output, transposed, ends)
    grad_input = emit.cast(emit(aten.mul.Tensor, before, found.weight), value_of(before).dtype)
    weighted = emit.cast(emit(aten.mul.Tensor, h, found.weight), value_of(h).dtype)
    for old, new in (
        (found.grad_input, grad_input),
        (found.grad_weight, found.summed(emit, before)),
        (found.grad_matrices, found.multiplied(emit, grad_output, weighted)),
    ):
        old.replace_all_uses_with(new)
    return True


def _weighted(product: fx.Node) -> _Weighted | None:
    if len(product.args) != 3 or value_of(product).dtype not in _FLOATS:
        return None
    results = list(_cast_and_masked(product))
    scalings = _scalings(results[-1])
    if scalings is None:
        return None
    weight, grad_output, grad_weight = scalings
    for user in grad_output.users:
        if user.target is aten.mul.Tensor and weight in user.args:
            scaled = [user, *list(_cast_and_masked(user))[1:]]
            products = _backward_of(product, scaled[-1])
            masks = _masks(results)
            if products is not None and masks.keys() >= _masks(scaled).keys():
                places = list(masks), scaled
                return _Weighted(product, weight, grad_output, grad_weight, *places, *products)
    return None


def _cast_and_masked(node: fx.Node) -> Iterator[fx.Node]:
    """``node``, and what it becomes where it is cast or rows are masked, and nothing else."""
    yield node
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in CASTS and not (_is_mask(user) and user.args[2] is node):
            return
        node = user
        yield node


def _is_mask(node: fx.Node) -> bool:
    """Zero in some rows."""
    if node.target is not aten.where.self:
        return False
    rows, zero, _ = node.args
    return _is_column(rows) and is_zeros(zero)


def _is_column(node: Any) -> bool:
    """A number a row: [rows, 1]."""
    value = value_of(node)
    return value.dim() == 2 and isinstance(value.shape[1], int) and value.shape[1] == 1


def _masks(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    """Those of ``nodes`` that are masked by, in order."""
    return dict.fromkeys(node.args[0] for node in nodes if _is_mask(node))  # type: ignore[misc]


def _scalings(result: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(weight, grad_output, the weight's gradient), if ``result`` is read for no more than that."""
    weights, gradients = list[tuple[fx.Node, fx.Node]](), list[tuple[fx.Node, fx.Node]]()
    for user in result.users:
        if user.target is not aten.mul.Tensor or len(user.all_input_nodes) != 2:
            return None
        (other,) = (node for node in user.all_input_nodes if node is not result)
        (weights if _is_column(other) else gradients).append((user, other))
    if len(weights) != 1 or len(gradients) != 1:
        return None
    ((_, weight),), ((along, grad_output),) = weights, gradients
    sums = list(along.users)
    one = len(sums) == 1 and sums[0].target is aten.sum.dim_IntList
    if not one or sums[0].args[1] not in ([1], [-1]) or value_of(along).dim() != 2:
        return None
    return weight, grad_output, sums[0]


def _backward_of(product: fx.Node, grad_output: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The products that give h's gradient, and the matrices'; None if others read it, too."""
    h, matrices, ends = product.args
    readers = [reader for user in grad_output.users for reader in _through(user)]
    grouped = [n for n in readers if n.target in GROUPED_PRODUCTS and n.args[2:] == (ends,)]
    inputs = [n for n in grouped if n.args[0] is grad_output and _swapped(n.args[1], matrices)]
    both = {h, grad_output}
    others = [n for n in grouped if {untranspose(a)[0] for a in n.all_input_nodes[:2]} == both]
    if len(readers) != 2 or len(inputs) != 1 or len(others) != 1:
        return None
    return inputs[0], others[0]


def _through(node: fx.Node) -> list[fx.Node]:
    transposed = node.target is aten.permute.default and node.args[1] == _TRANSPOSE
    return list(node.users) if transposed else [node]


def _swapped(node: Any, matrices: Any) -> bool:
    """It is ``matrices``, each transposed."""
    (one, often), (other, as_often) = _unswapped(node), _unswapped(matrices)
    return one is other and often != as_often


def _unswapped(node: Any) -> tuple[fx.Node, bool]:
    swapped = False
    while node.target is aten.permute.default and node.args[1] == _SWAP:
        node, swapped = node.args[0], not swapped
    return node, swapped
