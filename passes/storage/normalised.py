"""Whether something keeps the numbers that a tensor is made of from being of any size.

What a softmax sees is exponentiated, so an error of its operands counts absolutely: 12 bits of q
and k are enough for logits of a thousand, not of ten thousand. How large they get follows from
weights where a norm, or a function that is bounded itself, stands before; of data as the user gives
it nothing is known.
"""

from __future__ import annotations

from collections.abc import Set
from typing import cast

import torch
from torch import fx

from hot_compile.passes.base.graph import aten, strip
from hot_compile.passes.base.operators import BOUNDED, CASTS, RESHAPES, SCALED_BY_TENSOR, VIEWS

_ROOTS = {aten.rsqrt.default, aten.sqrt.default, aten.linalg_vector_norm.default}
_FOLLOWED = VIEWS | CASTS | {aten.clamp_min.default, aten.clamp.default, aten.reciprocal.default}
_PLACED = VIEWS | CASTS | {aten.as_strided.default}
_SAME = CASTS | {
    aten.permute.default,
    *RESHAPES,
    aten.alias.default,
    aten.clone.default,
    aten.expand.default,
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
        if made in seen or made not in activations or bounds(made):
            continue
        seen.add(made)
        if made.op == "placeholder" and is_numbers(made):
            return False
        stack.extend(made.all_input_nodes)
    return True


def bounds(node: fx.Node) -> bool:
    """``node`` is of a known size whatever it is computed from."""
    if node.target in BOUNDED:
        return True
    if node.target is aten.add.Tensor:
        return _is_affine(node) or _is_affine(node, swapped=True)
    return node.target in SCALED_BY_TENSOR and (_by_root(node) or _by_own_sum(node))


def _is_affine(total: fx.Node, swapped: bool = False) -> bool:
    """x scale + shift as a group norm has it: both made of weights and of 1 / deviation."""
    operands = [n for n in total.args[:2] if isinstance(n, fx.Node)]
    if len(operands) < 2:
        return False
    scaled, shift = reversed(operands) if swapped else operands
    shift = strip(shift, _PLACED)
    if scaled.target is not aten.mul.Tensor or shift.target is not aten.add.Tensor:
        return False
    scales = {strip(n, _PLACED) for n in scaled.all_input_nodes}
    roots = {n for n in scales if n.target is aten.mul.Tensor and _by_root(n)}
    return any(roots & set(part.all_input_nodes) for part in shift.all_input_nodes)


def _by_own_sum(scaled: fx.Node) -> bool:
    """Divided by the sum of what is divided, as a softmax."""
    numbers, divisor = scaled.args[0], scaled.args[1]
    if scaled.target is not aten.div.Tensor or not isinstance(divisor, fx.Node):
        return False
    total = strip(divisor, _FOLLOWED)
    return total.target is aten.sum.dim_IntList and total.args[0] is numbers


def summed_by_softmax(node: fx.Node) -> tuple[int, bool] | None:
    """(dimension of ``node`` whose sum a softmax over it relies on, whether that is 1).

    1 is the sum of its probabilities; not of those that are masked, and of powers of e. None of
    anything else.
    """
    if node.target in _SAME:
        source = cast(fx.Node, node.args[0])
        found = summed_by_softmax(source)
        dim = found and _moved(node, source, found[0])
        return None if found is None or dim is None else (dim, found[1])
    if node.target is aten.where.self:
        given = (n for n in node.args[1:] if isinstance(n, fx.Node))
        found = next(filter(None, map(summed_by_softmax, given)), None)
        return found and (found[0], False)
    if node.target is aten.exp.default:
        dims = (_softmax_dim(quotient) for quotient in node.users)
        return next(((dim, False) for dim in dims if dim is not None), None)
    dim = _softmax_dim(node)
    return None if dim is None else (dim, True)


def _moved(view: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Where ``view`` has the dimension ``dim`` of ``source``; None if it is cut, or not known."""
    if view.target is aten.permute.default:
        order = cast(list[int], view.args[1])
        return [d % len(order) for d in order].index(dim)
    was, now = source.meta["val"].shape, view.meta["val"].shape
    if was == now:
        return dim
    last = len(now) - 1
    return last if dim == len(was) - 1 and now and now[last] == was[dim] else None


def _softmax_dim(quotient: fx.Node) -> int | None:
    """The dimension over which powers of e are divided by their own sum."""
    if quotient.target is not aten.div.Tensor or not _by_own_sum(quotient):
        return None
    powers, divisor = quotient.all_input_nodes
    dims = cast(list[int], strip(divisor, _FOLLOWED).args[1])
    if powers.target is not aten.exp.default or len(dims) != 1:
        return None
    return dims[0] % quotient.meta["val"].dim()


def _by_root(scaled: fx.Node) -> bool:
    return any(map(_is_root, scaled.all_input_nodes))


def _is_root(scale: fx.Node) -> bool:
    """A root of a sum of squares, or one over it."""
    source = strip(scale, _FOLLOWED)
    power = source.target is aten.pow.Tensor_Scalar and abs(source.args[1]) == 0.5  # type: ignore
    return power or source.target in _ROOTS


def is_numbers(node: fx.Node) -> bool:
    """Not indices, sizes or masks."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
