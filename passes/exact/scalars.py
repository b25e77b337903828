"""Backward graph -> the same, where what is scaled by a number is a small product, not its operand.

An adapter's result is scaled (LoRA's alpha / r). So its backward scales a gradient as wide as the
layer for two products with a rank of 16, while the layer's own product reads it unscaled, and
Inductor writes both: of a Llama-8B's MLP, 8192 tokens, twice 224 MiB that stand together with nine
others at a checkpointed step's peak. A number that is a power of two gives the same bits either
way, any other one rounding less of what is large and one more of what is small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from hot_compile.passes.base.emit import Emitter
from hot_compile.passes.base.graph import aten, is_ours, strip, through_views
from hot_compile.passes.base.operators import MATRIX_PRODUCTS, VIEWS
from hot_compile.passes.base.site import bytes_of, elements_of
from hot_compile.passes.cost.linear import Rates

_SCALED = {aten.mul.Tensor, aten.mul.Scalar}
_FLOATS = {torch.bfloat16, torch.float32}
"""Of float16 a small number's product might leave its range without the number."""
_SMALLER = 4
"""Times: a result that is less so is not worth another kernel."""


def scale_behind(graph: fx.Graph, rates_of: Callable[[torch.device], Rates | None]) -> int:
    """Move numbers behind products where that saves writing a tensor; returns how many."""
    count = 0
    for node in graph.nodes:
        if _is_scaled(node) and _is_written(strip(node.args[0], VIEWS)):
            products = list(through_views(node))
            if all(_is_smaller(product, node) for product in products) and _pays(
                node, len(products), rates_of
            ):
                _move(graph, node, products)
                count += 1
    return count


def _is_scaled(node: fx.Node) -> bool:
    """A tensor times a number, of the same dtype and layout."""
    if node.target not in _SCALED or not isinstance(node.args[1], (int, float)):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    alike = str(before.stride()) == str(after.stride())  # sizes may be symbols: no guards
    return alike and before.dtype is after.dtype and after.dtype in _FLOATS


def _is_written(tensor: fx.Node) -> bool:
    """A product reads it from memory, whatever becomes of the scaled one."""
    return any(n.target in MATRIX_PRODUCTS or is_ours(n) for n in through_views(tensor))


def _is_smaller(product: fx.Node, scaled: fx.Node) -> bool:
    """It reads what is scaled as one of its operands, and makes much less of it."""
    if product.target is not aten.mm.default:
        return False
    operands = [strip(operand, VIEWS) is scaled for operand in product.all_input_nodes]
    made, read = (elements_of(n.meta["val"]) for n in (product, scaled))
    return operands.count(True) == 1 and len(operands) > 1 and _SMALLER * made <= read


def _pays(node: fx.Node, products: int, rates_of: Callable[[torch.device], Rates | None]) -> bool:
    """Writing it takes longer than the kernels that scale the products instead."""
    value = node.meta["val"]
    rates = rates_of(value.device)
    if not products or rates is None or not rates.asynchronous:
        return False
    return bytes_of(value) / rates.copy > products * rates.launch


def _move(graph: fx.Graph, node: fx.Node, products: list[fx.Node]) -> None:
    source, number = node.args
    for product in products:
        readers = list(product.users)
        scaled = Emitter(graph, product.next, product)(aten.mul.Tensor, product, number)
        for reader in readers:
            reader.replace_input_with(product, scaled)
    node.replace_all_uses_with(source)  # type: ignore[arg-type]
    graph.erase_node(node)
