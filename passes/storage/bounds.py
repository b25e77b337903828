"""Whether something keeps the numbers that a tensor is made of from being of any size.

What a softmax sees is exponentiated, so an error of its operands counts absolutely: 12 bits of q
and k are enough for logits of a thousand, not of ten thousand. How large they get follows from
weights where a norm, or a function that is bounded itself, stands before; of data as the user gives
it nothing is known. And only what no norm bounds may have most of itself in common from row to row.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from hot_compile.passes.base.graph import as_made, aten, strip
from hot_compile.passes.base.operators import BOUNDED, CASTS, SATURATED, SCALED_BY_TENSOR, VIEWS

_ROOTS = {aten.rsqrt.default, aten.sqrt.default, aten.linalg_vector_norm.default}
_FOLLOWED = {
    *(VIEWS | CASTS),
    aten.clone.default,
    aten.as_strided.default,
    aten.clamp_min.default,
    aten.clamp.default,
    aten.reciprocal.default,
}


def is_normalised(node: fx.Node, activations: Set[fx.Node]) -> bool:
    """Every way back from ``node`` meets a norm or parameters before it meets data.

    Args:
        activations: nodes of its graph, the forward, that depend on more than parameters.
    """
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        made = stack.pop()
        if made in seen or made not in activations or _bounds(made, activations):
            continue
        seen.add(made)
        value = made.meta.get("val")
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        if made.op == "placeholder" and floating:
            return False
        stack.extend(made.all_input_nodes)
    return True


def _bounds(node: fx.Node, activations: Set[fx.Node]) -> bool:
    """``node`` is of a known size whatever it is computed from."""
    if node.target not in SCALED_BY_TENSOR:
        return node.target in BOUNDED
    return _by_own_sum(node) or any(_is_root(n, activations) for n in node.all_input_nodes)


def is_probability(node: fx.Node) -> bool:
    """What a softmax makes, masked or not, or the powers of e that it divides by their sum."""
    made = as_made(node)
    if made.target is aten.where.self:
        return any(is_probability(n) for n in made.args[1:] if isinstance(n, fx.Node))
    powers = made.target is aten.exp.default and any(map(_by_own_sum, made.users))
    return powers or made.target is aten._softmax.default or _by_own_sum(made)


def sums_to_one(node: fx.Node) -> bool:
    """Each of its rows does: a softmax over the last dimension, and nothing masked behind it."""
    if not _by_own_sum(node):
        return False
    powers, total = node.all_input_nodes
    if powers.target is not aten.exp.default or total.target is not aten.sum.dim_IntList:
        return False
    return bool(total.meta["val"].shape == (*powers.meta["val"].shape[:-1], 1))


def is_saturated(node: fx.Node) -> bool:
    """The result of a function that ends in a straight line, where its slope is next to nothing."""
    return as_made(node).target in SATURATED


def _by_own_sum(scaled: fx.Node) -> bool:
    """Powers of e divided by their sum, as a softmax, or whatever else is divided so."""
    if scaled.target is not aten.div.Tensor or not isinstance(scaled.args[1], fx.Node):
        return False
    total = strip(scaled.args[1], _FOLLOWED)
    return total.target is aten.sum.dim_IntList and total.args[0] is scaled.args[0]


def _is_root(scale: fx.Node, activations: Set[fx.Node]) -> bool:
    """A root of a sum of squares, one over it, or that times parameters."""
    source = strip(scale, _FOLLOWED)
    if source.target is aten.mul.Tensor:
        roots = [n for n in source.all_input_nodes if n in activations]
        return len(roots) == 1 and _is_root(roots[0], activations)
    power = source.target is aten.pow.Tensor_Scalar and abs(source.args[1]) == 0.5  # type: ignore
    return power or source.target in _ROOTS
